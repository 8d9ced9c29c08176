"""Which implementation of the clustering runs, and why the others do not.

A backend is a module with two functions over float32 distances (B, N, N), whose upper triangle alone counts:

    labels(distances, linkage, k, threshold, weights=None) -> (B, N) int64
        k (B,) int64 groups per item, or every merge at or below threshold; the other one is None
    tree(distances, linkage, weights=None) -> (B, N-1, 4) float64 (float32 where the device has no float64)

Weights (B, N) are float32. Both functions leave `distances` as it was. `linkage/reference.py` says what they must
return, ties included.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from agglo.checks import choice

VARIABLE = "AGGLO_BACKEND"
NAMES = ("reference", "cpu", "torch", "triton")


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here, and if not, why."""

    name: str
    usable: bool
    note: str


@cache
def _triton_status() -> tuple[bool, str]:
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "interpreted on cpu (TRITON_INTERPRET=1): for tests, slow"
    if not torch.cuda.is_available():
        return False, "no CUDA device is available"
    return True, f"tensors on {torch.cuda.get_device_name()}"


def backends() -> list[BackendStatus]:
    """List every backend, whether it is usable on this machine, and why not where it is not.

    >>> [status.name for status in backends()]
    ['reference', 'cpu', 'torch', 'triton']
    """
    return [
        BackendStatus("reference", True, "tensors on any device, slow: the definition the others are tested against"),
        BackendStatus("cpu", True, f"tensors on cpu, {torch.get_num_threads()} threads"),
        BackendStatus("torch", True, "tensors on any device"),
        BackendStatus("triton", *_triton_status()),
    ]


def choose(backend: str | None, device: torch.device) -> str:
    """Return the name of the backend for a device: as asked, as AGGLO_BACKEND says, or the fastest that runs."""
    asked_by = "backend"
    if backend is None and os.environ.get(VARIABLE):
        backend, asked_by = os.environ[VARIABLE], VARIABLE
    if backend is None:
        if device.type == "cpu":
            return "cpu"
        return "triton" if device.type == "cuda" and _triton_status()[0] else "torch"
    choice(asked_by, backend, NAMES)
    usable, note = _triton_status()
    if backend == "triton" and not usable:
        raise ValueError(f"{asked_by}='triton' cannot run here: {note}; see agglo.clustering.backends()")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    needed = {"cpu": "cpu", "triton": device.type if interpreted else "cuda"}.get(backend, device.type)
    if device.type != needed:
        raise ValueError(f"{asked_by}={backend!r} needs tensors on {needed}, got {device}; 'torch' runs anywhere")
    return backend


@cache
def module(name: str) -> ModuleType:
    """Import a backend's module on first use."""
    return import_module(f"agglo.clustering.linkage.{name}")


def load(backend: str, device: torch.device) -> ModuleType:
    """Return the module to run on a device; an empty name leaves the choice to `choose`."""
    return module(choose(backend or None, device))
