"""Where a measurement ran: the machine, its load, the versions and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from agglo.version import __version__

_QUIET = 0.3  # load per core


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the hardware, versions and load of this machine. load: of the last minute, ours included."""
    on_cuda = device is not None and device.type == "cuda"
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_cuda else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": version("timm"),
        "agglo": __version__,
        "commit": commit(),
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


def cpu_model() -> str:
    """Return the CPU's model name, or its architecture where the system gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the source tree agglo runs from, "-dirty" if changed; None for an installed package."""
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
