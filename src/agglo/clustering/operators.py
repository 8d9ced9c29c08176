"""Agglomerative clustering as torch operators, and which backend runs it.

torch.compile and torch.export pass over an operator without a graph break. What depends on values or on the machine
(the checks, the choice of backend) happens inside, so a program exported on one machine picks its backend on another.

A backend is a module `linkage/NAME` with one function over float32 distances (B, N, N), which stay as they were and
whose upper triangle alone counts:

    labels(distances, linkage, k, threshold) -> (B, N) int64
        k (B,) int64 groups per item, or every merge at or below threshold; the other one is None

`linkage/reference.py` says what it must return, ties included. Trees are grown on the CPU, for tensors of any device.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agglo.checks import choice
from agglo.clustering import gpu
from agglo.clustering.distances import cosine_on_cpu, edge_distances, matrices, mean_over_heads
from agglo.clustering.grid import windows
from agglo.compiling import VARIABLE

BACKENDS = ("reference", "cpu", "torch", "triton")


class BackendStatus(NamedTuple):
    """Whether a backend can run here, and if not, why."""

    name: str
    usable: bool
    note: str


def _triton_status() -> tuple[bool, str]:
    if gpu.why_not():
        return False, gpu.why_not()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "interpreted on cpu (TRITON_INTERPRET=1): for tests, slow"
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


def choose(backend: str, device: torch.device) -> str:
    """Return the name of the backend for a device: as asked; if that is "", as AGGLO_BACKEND says, or the fastest."""
    asked_by, backend = ("backend", backend) if backend else (VARIABLE, os.environ.get(VARIABLE, ""))
    if not backend:
        if device.type == "cpu":
            return "cpu"
        return "triton" if device.type == "cuda" and not gpu.why_not() else "torch"
    choice(asked_by, backend, BACKENDS)
    if backend == "triton" and gpu.why_not():
        raise ValueError(f"{asked_by}='triton' cannot run here: {gpu.why_not()}; see agglo.clustering.backends()")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    needed = {"cpu": "cpu", "triton": device.type if interpreted else "cuda"}.get(backend, device.type)
    if device.type != needed:
        raise ValueError(f"{asked_by}={backend!r} needs tensors on {needed}, got {device}; 'torch' runs anywhere")
    return backend


@cache
def module(name: str) -> ModuleType:
    """Import a backend's module on first use."""
    return import_module(f"agglo.clustering.linkage.{name}")


def _validate(data: Tensor, metric: str, check: bool | None, weights: Tensor | None) -> None:
    """Raise for values that cannot be clustered, if they are to be checked; None checks on the CPU only."""
    if not (data.device.type == "cpu" if check is None else check):
        return
    if data.dim() == 4:
        data = mean_over_heads(data)
    largest = data.abs().amax(dim=-1)  # of each token; NaN if there is one
    name = "distances" if metric == "precomputed" else "features"
    _refuse(~largest.isfinite().all(dim=1), name + " of batch item {} hold NaN or infinity")
    if metric == "cosine":
        _refuse(
            largest == 0,
            "features of batch item {} hold a zero vector at token {}: its cosine distance to others is undefined "
            "(metric='euclidean' accepts it)",
        )
    if weights is not None:
        _refuse(~(weights >= 0) | weights.isinf(), "weights of batch item {} at token {} must be finite and at least 0")


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise a message that names the first item (B,), or item and token (B, N), that is wrong."""
    if bool(wrong.any()):
        raise ValueError(message.format(*wrong.nonzero()[0].tolist()))


@torch.library.custom_op("agglo::cluster", mutates_args=())
def cluster(
    data: Tensor,
    metric: str,
    linkage: str,
    k: int | None,
    ks: Tensor | None,
    threshold: float | None,
    check: bool | None,
    backend: str,
    weights: Tensor | None,
    grid: list[int],
    window: list[int],
    spread: str,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,), from arguments of `agglo.cluster` that were checked.

    Data are features (B, N, D) or (B, H, N, D), or distances (B, N, N) where the metric is "precomputed". Given is k of
    every item, or int64 ks (B,), or a threshold. Without a grid any two groups merge, without a window neighbours on
    the grid.
    """
    name, counts = choose(backend, data.device), ks
    # The CPU's kernels make distances image by image, as they cluster them, and see what has no direction on the way.
    in_cache = cosine_on_cpu(data, metric, weights) if name == "cpu" and not grid else None
    if in_cache is None or weights is not None:
        _validate(data, metric, check, weights)
    if k is not None:
        counts = torch.full((len(data),), k, dtype=torch.int64, device=data.device)
    find = module(name).labels if backend or name != "triton" else _triton_or_torch
    if not grid:
        labels = find(matrices(data, metric, weights) if in_cache is None else in_cache, linkage, counts, threshold)
        if in_cache is not None and in_cache.without_direction[0]:
            _validate(data, metric, check, weights)
    elif window:
        data = mean_over_heads(data) if data.dim() == 4 else data
        labels = windows.labels(data, metric, weights, grid, window, find, linkage, k, threshold, spread)
    else:
        lengths = edge_distances(data, metric, grid, weights).nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38).cpu()
        # A heap of edges on the CPU serves every device: rounds on a GPU would wait for the host some 60 times.
        on_grid = import_module(f"agglo.clustering.grid.{'reference' if name == 'reference' else 'cpu'}")
        labels = on_grid.labels(lengths, grid, linkage, None if counts is None else counts.cpu(), threshold)
        labels = labels.to(data.device)
    return labels, labels.amax(dim=1) + 1 if counts is None else counts.clone() if counts is ks else counts


def _triton_or_torch(*arguments: Any) -> Tensor:
    return gpu.attempt(lambda: module("triton").labels(*arguments), lambda: module("torch").labels(*arguments))


@cluster.register_fake
def _(data: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    labels = data.new_empty((data.shape[0], data.shape[-2]), dtype=torch.int64)
    return labels, data.new_empty(data.shape[:1], dtype=torch.int64)


@torch.library.custom_op("agglo::linkage", mutates_args=())
def tree(data: Tensor, metric: str, linkage: str, check: bool | None, weights: Tensor | None) -> Tensor:
    """Linkage matrices (B, N-1, 4); arguments as of `cluster`."""
    _validate(data, metric, check, weights)
    merges: Tensor = module("cpu").tree(matrices(data, metric, weights).cpu(), linkage)
    return merges.to(data.device, _tree_dtype(data))


@tree.register_fake
def _(data: Tensor, *_: Any, **__: Any) -> Tensor:
    return data.new_empty((data.shape[0], data.shape[-2] - 1, 4), dtype=_tree_dtype(data))


def _tree_dtype(data: Tensor) -> torch.dtype:
    return torch.float32 if data.device.type == "mps" else torch.float64
