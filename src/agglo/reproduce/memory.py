"""Memory that runs out is to be an error in Python, not the end of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SHARE = 0.9  # of what is free, that may be taken


@contextmanager
def refused_when_full(device: torch.device) -> Iterator[None]:
    """Inside, a CPU's memory is refused once nearly all that was free is taken; Linux would otherwise promise it and
    kill the process later. A GPU refuses by itself."""
    free = _free_bytes()
    if device.type != "cpu" or free is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _taken_bytes() + int(_SHARE * free)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _free_bytes() -> int | None:
    """None off Linux."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _taken_bytes() -> int:
    """What the limit counts: all private memory that may be written, used or not."""
    return _field(Path("/proc/self/status"), "VmData") or 0


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
