"""Where a measurement ran: the machine, its load, the versions and the commit."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Mapping
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


@torch.inference_mode()
def peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes that the second of two calls needed at once; None where the system does not tell.

    Call it after all timing: on a CPU large blocks are from then on given back as soon as they are free.
    """
    if device.type == "cuda":
        run()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not Path("/proc/self/clear_refs").exists():
        return None
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD of glibc
    run()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _memory_status("VmRSS")
    run()
    return _memory_status("VmHWM") - before


def _memory_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


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
