"""Where a measurement ran: the machine, its load, the versions and the commit."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL, SubprocessError, check_output
from typing import Any

import torch

from agglo.version import __version__

_QUIET = 0.3  # load per core


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the hardware, versions and load of this machine. load: of the last minute, ours included."""
    on_cuda = device is not None and device.type == "cuda"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_cuda else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": version("timm"),
        "agglo": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def processor(found: Mapping[str, Any]) -> str:
    """Return what a `machine` computes with: its GPU, or else its CPU."""
    return str(found["gpu"] or found["cpu"])


def load_warning(found: dict[str, Any]) -> str | None:
    """Return a warning if the machine was busy when `machine` looked; None if it was close to idle."""
    load, cores = found["load"], found["cores"]
    if load is None or load <= _QUIET * cores:
        return None
    return f"beware: the load was {load:g} on {cores} cores when this started; others were at work"


def _cpu_model() -> str:
    """Return the CPU's model name, or its architecture where the system gives none."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", path.read_text(encoding="utf-8")) if path.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree agglo runs from, "-dirty" if changed; None for an installed package."""
    git = partial(check_output, cwd=Path(__file__).parents[1], stderr=DEVNULL, text=True, timeout=10)
    try:
        # An installed package may lie inside the repository of another project.
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])
        return git(["git", "describe", "--always", "--dirty", "--abbrev=12"]).strip()
    except (OSError, SubprocessError):
        return None


def version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
