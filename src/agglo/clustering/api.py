"""cluster, linkage and cut: what users of the clustering call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from agglo.checks import number
from agglo.clustering import arguments
from agglo.clustering import tree as trees
from agglo.clustering.grid.operators import cluster as cluster_on_grid
from agglo.clustering.grid.operators import grid_options
from agglo.clustering.linkage.operators import Request
from agglo.clustering.linkage.operators import cluster as cluster_all
from agglo.clustering.linkage.operators import tree as whole_tree


@overload
def cluster(
    features: Tensor | None = ...,
    k: int | Sequence[int] | Tensor = ...,
    linkage: str = ...,
    *,
    distances: Tensor | None = ...,
    weights: Tensor | None = ...,
    metric: str = ...,
    grid: tuple[int, int] | None = ...,
    window: int | tuple[int, int] | None = ...,
    connectivity: str | None = ...,
    spread: str = ...,
    backend: str | None = ...,
    check: bool | None = ...,
) -> Tensor: ...


@overload
def cluster(
    features: Tensor | None = ...,
    k: None = ...,
    linkage: str = ...,
    *,
    threshold: float,
    distances: Tensor | None = ...,
    weights: Tensor | None = ...,
    metric: str = ...,
    grid: tuple[int, int] | None = ...,
    window: int | tuple[int, int] | None = ...,
    connectivity: str | None = ...,
    spread: str = ...,
    backend: str | None = ...,
    check: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


def cluster(
    features: Tensor | None = None,
    k: int | Sequence[int] | Tensor | None = None,
    linkage: str = "average",
    *,
    threshold: float | None = None,
    distances: Tensor | None = None,
    weights: Tensor | None = None,
    metric: str = "cosine",
    grid: tuple[int, int] | None = None,
    window: int | tuple[int, int] | None = None,
    connectivity: str | None = None,
    spread: str = "even",
    backend: str | None = None,
    check: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cluster every token set of a batch bottom-up: exactly k groups, or all merges within a threshold.

    Distances are computed and compared in float32 whatever the dtype of the input, under autocast too. Ties merge the
    first pair first (see `clustering/linkage/reference.py`), on every backend. Of the arguments, the first six matter
    most; grid, window and connectivity are for many tokens (see docs/clustering.md); the rest is to tinker with.

    Args:
        features: tokens (B, N, D) or (N, D), any floating dtype.
        k: groups to end with: one int, or one per batch item (a list, or a tensor (B,)). More than N means N.
        linkage: "average", "single" or "complete".
        threshold: instead of k: merge while the closest two groups are at most this far apart.
        distances: instead of features: (B, N, N) or (N, N), symmetric; only the upper triangle is used.
        weights: one number >= 0 per token, (B, N) or (N,), floating point: the distance of two tokens is multiplied by
            the larger one of their weights, in float32, before anything else. Heavy tokens merge late.
        metric: "cosine" or "euclidean", for features.
        grid: (height, width) of the tokens, row by row, with one of window and connectivity.
        window: cluster exactly within windows of so many tokens per side, an int or (height, width).
        connectivity: "grid" lets only groups merge that touch, as scikit-learn's connectivity does.
        spread: k groups over windows "even"ly, in proportion to their tokens, or by "need", closest groups first.
        backend: one of `agglo.clustering.backends()`; None takes the fastest that runs, or what AGGLO_BACKEND names.
        check: look for NaN, infinities, zero vectors (cosine), asymmetry and negative weights. None checks on the CPU
            only: elsewhere the look at the result would make the host wait for the device on every call. Unchecked bad
            values give some k groups (or any number, with a threshold) without meaning.

    Returns:
        Labels (B, N) or (N,), int64, groups numbered by their first member. With a threshold also the number of
        groups, (B,) or a 0-d tensor. No gradient flows through either.

    Raises:
        ValueError: for arguments that are wrong or do not fit each other, and for bad values if they are checked.

    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> cluster(features, k=2)
    tensor([0, 0, 1])
    >>> cluster(features, threshold=0.2)
    (tensor([0, 0, 1]), tensor(2))
    >>> cluster(features, k=2, weights=torch.tensor([1000.0, 1.0, 1.0]))
    tensor([0, 1, 1])
    """
    data, metric, single = arguments.data_and_metric(features, distances, metric)
    own_weights = arguments.token_weights(weights, data, single)
    arguments.require_how(linkage, check, backend)
    if (k is None) == (threshold is None):
        raise ValueError(f"give either k or threshold, not {'neither' if k is None else 'both'}")
    batch, n_tokens = data.shape[:2]
    count = None if k is None else arguments.group_count(k, batch, n_tokens, data.device)
    one_k, many_k = (None, count) if isinstance(count, Tensor) else (count, None)
    limit = None if threshold is None else float(number("threshold", threshold))
    request = Request(data, metric, linkage, one_k, many_k, limit, check, backend or "", own_weights)
    if grid is None and window is None and connectivity is None and spread == "even":
        labels, counts = cluster_all(*request)
    else:
        labels, counts = cluster_on_grid(*request, **grid_options(grid, window, connectivity, spread, n_tokens, count))
    if single:
        labels, counts = labels[0], counts[0]
    return labels if threshold is None else (labels, counts)


def linkage(
    features: Tensor | None = None,
    linkage: str = "average",
    *,
    distances: Tensor | None = None,
    weights: Tensor | None = None,
    metric: str = "cosine",
    backend: str | None = None,
    check: bool | None = None,
) -> Tensor:
    """Return the whole tree of merges in SciPy's layout; arguments as in `cluster`.

    Returns:
        Z (B, N-1, 4) or (N-1, 4), float64 (float32 on MPS): row m merges nodes Z[m, 0] < Z[m, 1] at distance Z[m, 2]
        into node N + m with Z[m, 3] tokens. Distances never decrease down the rows.
        `scipy.cluster.hierarchy.dendrogram(Z.numpy())` draws it.

    >>> linkage(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0., 1., 1., 2.]], dtype=torch.float64)
    """
    data, metric, single = arguments.data_and_metric(features, distances, metric)
    arguments.require_how(linkage, check, backend)
    own_weights = arguments.token_weights(weights, data, single)
    tree = whole_tree(data, metric, linkage, check, backend or "", own_weights)
    return tree[0] if single else tree


def cut(tree: Tensor, k: int | Sequence[int] | Tensor) -> Tensor:
    """Return labels (B, N) or (N,) with exactly k groups from a tree of `linkage`: many cuts from one tree.

    Merges are undone from the last one back, never compared by height, so ties cannot change the number of groups.

    >>> tree = linkage(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]))
    >>> cut(tree, 2), cut(tree, 1)
    (tensor([0, 0, 1]), tensor([0, 0, 0]))
    """
    if not isinstance(tree, Tensor) or tree.dim() not in (2, 3) or tree.shape[-1] != 4:
        shape = tuple(tree.shape) if isinstance(tree, Tensor) else type(tree).__name__
        raise ValueError(f"tree must be the result of agglo.linkage, (B, N-1, 4) or (N-1, 4), got {shape}")
    single = tree.dim() == 2
    tree = tree.unsqueeze(0) if single else tree
    count = arguments.group_count(k, tree.shape[0], tree.shape[1] + 1, tree.device)
    if not isinstance(count, Tensor):
        count = torch.full((tree.shape[0],), count, dtype=torch.int64, device=tree.device)
    labels = trees.cut(tree, count)
    return labels[0] if single else labels
