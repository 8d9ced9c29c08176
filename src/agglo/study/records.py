"""What a measurement leaves behind: the machine it ran on, and JSON that a crash cannot tear."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import agglo

_QUIET = 0.3  # load a core


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Where and with what a measurement ran; threads are those torch uses now, load what others run."""
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
        "timm": _version("timm"),
        "agglo": agglo.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def load_warning(found: dict[str, Any]) -> str | None:
    """A line about others at work when `machine` looked; None if the machine was as good as idle."""
    load, cores = found["load"], found["cores"]
    if load is None or load <= _QUIET * cores:
        return None
    return f"beware: the load was {load:g} on {cores} cores when this started; others were at work"


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the source tree agglo runs from, "-dirty" if changed; None for an installed package."""
    folder = Path(agglo.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write the whole file or leave the old one: a reader never meets half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def require_folder(path: Path) -> Path:
    """The path itself, if its folder exists; told before any work is done."""
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r} lies in no folder: {str(path.parent)!r} does not exist")
    return path


def require_device(name: str) -> torch.device:
    """A device by name, if it is there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} is not available here: {reason}") from error
    return device


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Torch on so many CPU threads inside; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
