"""The clustering as torch operators, so that torch.compile and torch.export pass over it without a graph break.

What depends on values or on the machine (the checks, the choice of backend) happens inside the operators; shapes and
dtypes are all the fake implementations need to know. A program exported on one machine so picks its backend on another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.clustering import dispatch
from agglo.clustering.arguments import (
    require_clusterable_distances,
    require_clusterable_features,
    require_sound_weights,
)
from agglo.clustering.distances import pairwise


def check_features_and_weights(data: Tensor, metric: str, weights: Tensor | None) -> None:
    """Distances are checked apart, by `check_distances` or on the way."""
    if metric != "precomputed":
        require_clusterable_features(data, metric)
    if weights is not None:
        require_sound_weights(weights, data, metric)


def _distances(data: Tensor, metric: str) -> Tensor:
    """Contiguous float32 distances (B, N, N)."""
    return data.to(torch.float32).contiguous() if metric == "precomputed" else pairwise(data, metric)


def check_distances(distances: Tensor, dtype: torch.dtype) -> None:
    inspect = dispatch.module("cpu" if distances.device.type == "cpu" else "torch").inspect
    require_clusterable_distances(inspect(distances), dtype)


@torch.library.custom_op("agglo::cluster", mutates_args=())
def cluster(
    data: Tensor,
    metric: str,
    linkage: str,
    k: int,
    ks: Tensor | None,
    threshold: float | None,
    check: bool | None,
    backend: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) of features or distances, with float32 weights (B, N) if any.

    k is used where ks and threshold are None.
    """
    check = data.device.type == "cpu" if check is None else check
    if check:
        check_features_and_weights(data, metric, weights)
    if threshold is None and ks is None:
        ks = torch.full((data.shape[0],), k, dtype=torch.int64, device=data.device)
    module = dispatch.load(backend, data.device)
    on_cpu = module is dispatch.module("cpu")
    if on_cpu and metric != "precomputed":
        labels = module.labels_of_features(data, metric, linkage, ks, threshold, weights)
    elif on_cpu and metric == "precomputed" and check:
        labels, found = module.labels_and_inspection(_distances(data, metric), linkage, ks, threshold, weights)
        require_clusterable_distances(found, data.dtype)
    else:
        distances = _distances(data, metric)
        if check and metric == "precomputed":
            check_distances(distances, data.dtype)
        labels = module.labels(distances, linkage, ks, threshold, weights)
    counts = labels.amax(dim=1) + 1 if ks is None else ks.clone()
    return labels, counts


@cluster.register_fake
def _(
    data: Tensor,
    metric: str,
    linkage: str,
    k: int,
    ks: Tensor | None,
    threshold: float | None,
    check: bool | None,
    backend: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, n_tokens = data.shape[:2]
    labels = data.new_empty((batch, n_tokens), dtype=torch.int64)
    return labels, data.new_empty((batch,), dtype=torch.int64)


def tree_dtype(device: torch.device) -> torch.dtype:
    """float64 as SciPy wants it, except where the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.library.custom_op("agglo::linkage", mutates_args=())
def linkage(
    data: Tensor, metric: str, linkage: str, check: bool | None, backend: str, weights: Tensor | None = None
) -> Tensor:
    """The linkage matrices (B, N-1, 4) of features or distances, with float32 weights (B, N) if any."""
    check = data.device.type == "cpu" if check is None else check
    if check:
        check_features_and_weights(data, metric, weights)
    distances = _distances(data, metric)
    if check and metric == "precomputed":
        check_distances(distances, data.dtype)
    return dispatch.load(backend, data.device).tree(distances, linkage, weights).to(tree_dtype(data.device))


@linkage.register_fake
def _(
    data: Tensor, metric: str, linkage: str, check: bool | None, backend: str, weights: Tensor | None = None
) -> Tensor:
    batch, n_tokens = data.shape[:2]
    return data.new_empty((batch, n_tokens - 1, 4), dtype=tree_dtype(data.device))
