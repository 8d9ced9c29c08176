"""Agglomerative clustering as torch operators, which torch.compile and torch.export pass over without a graph break.

What depends on values or on the machine (the checks, the choice of backend) happens inside the operators; shapes and
dtypes are all the fake implementations need to know. So a program exported on one machine picks its backend on another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from agglo.clustering import dispatch
from agglo.clustering.arguments import (
    require_clusterable_distances,
    require_clusterable_features,
    require_sound_weights,
)
from agglo.clustering.distances import pairwise
from agglo.clustering.tree import precise_dtype


class Request(NamedTuple):
    """The arguments of one clustering, checked. Exactly one of k, ks and threshold is given."""

    data: Tensor  # features (B, N, D), or distances (B, N, N) where metric is "precomputed"
    metric: str
    linkage: str
    k: int | None
    ks: Tensor | None  # (B,) int64: groups per item
    threshold: float | None
    check: bool | None  # None: on the CPU only
    backend: str  # "": the fastest that runs
    weights: Tensor | None  # (B, N) float32

    def validate(self) -> None:
        """Raise ValueError for values that cannot be clustered, if they are to be looked at."""
        if not (self.data.device.type == "cpu" if self.check is None else self.check):
            return
        if self.metric == "precomputed":
            inspect = dispatch.module("cpu" if self.data.device.type == "cpu" else "torch").inspect
            require_clusterable_distances(inspect(self.distances()), self.data.dtype)
        else:
            require_clusterable_features(self.data, self.metric)
        if self.weights is not None:
            require_sound_weights(self.weights)

    def distances(self) -> Tensor:
        """Contiguous float32 distances (B, N, N), without weights."""
        given = self.metric == "precomputed"
        return self.data.to(torch.float32).contiguous() if given else pairwise(self.data, self.metric)

    def counts(self) -> Tensor | None:
        """Groups per item (B,), or None for a threshold."""
        if self.k is None:
            return self.ks
        return torch.full((len(self.data),), self.k, dtype=torch.int64, device=self.data.device)


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
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) for the fields of a `Request`."""
    request = Request(data, metric, linkage, k, ks, threshold, check, backend, weights)
    request.validate()
    counts = request.counts()
    labels = dispatch.load(backend, data.device).labels(request.distances(), linkage, counts, threshold, weights)
    return labels, labels.amax(dim=1) + 1 if counts is None else counts.clone()


@cluster.register_fake
def fake_labels(data: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) without values."""
    return data.new_empty(data.shape[:2], dtype=torch.int64), data.new_empty(data.shape[:1], dtype=torch.int64)


@torch.library.custom_op("agglo::linkage", mutates_args=())
def tree(
    data: Tensor, metric: str, linkage: str, check: bool | None, backend: str, weights: Tensor | None = None
) -> Tensor:
    """Linkage matrices (B, N-1, 4) for the fields of a `Request`."""
    request = Request(data, metric, linkage, None, None, None, check, backend, weights)
    request.validate()
    merges: Tensor = dispatch.load(backend, data.device).tree(request.distances(), linkage, weights)
    return merges.to(precise_dtype(data.device))


@tree.register_fake
def _(data: Tensor, *_: Any, **__: Any) -> Tensor:
    return data.new_empty((data.shape[0], data.shape[1] - 1, 4), dtype=precise_dtype(data.device))
