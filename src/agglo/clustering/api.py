"""cluster, linkage and cut: what users of the clustering call, and the checks of what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agglo.checks import choice, number, whole_numbers
from agglo.clustering import operators
from agglo.clustering.linkage import torch as in_torch

LINKAGES = ("single", "average", "complete")
METRICS = ("cosine", "euclidean")
CONNECTIVITIES = ("grid",)
SPREADS = ("even", "need")


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
) -> Any:
    """Cluster every token set of a batch bottom-up: exactly k groups, or all merges within a threshold.

    Distances are float32 whatever the dtype of the input, under autocast too. Ties merge the first pair first, on every
    backend. Of the arguments, the first six matter most; grid, window and connectivity are for many tokens (see
    docs/clustering.md); the rest is to tinker with.

    Args:
        features: tokens (B, N, D) or (N, D), any floating dtype, or (B, H, N, D), whose mean over heads counts.
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
        check: look for NaN, infinities, zero vectors (cosine) and negative weights. None checks on the CPU only:
            elsewhere the host would wait for the device. Unchecked bad values give some k groups without meaning.

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
    data, metric, own_weights, single = _prepare(features, distances, metric, weights, linkage, check)
    if backend is not None:
        choice("backend", backend, operators.BACKENDS)
    if (k is None) == (threshold is None):
        raise ValueError(f"give either k or threshold, not {'neither' if k is None else 'both'}")
    batch, n_tokens = data.shape[0], data.shape[-2]
    count = None if k is None else _group_count(k, batch, n_tokens, data.device)
    one_k, many_k = (None, count) if isinstance(count, Tensor) else (count, None)
    limit = None if threshold is None else float(number("threshold", threshold))
    where: tuple[list[int], list[int]] = [], []
    if grid is not None or window is not None or connectivity is not None or spread != "even":
        where = _grid_and_window(grid, window, connectivity, spread, n_tokens, count)
    labels, counts = operators.cluster(
        data, metric, linkage, one_k, many_k, limit, check, backend or "", own_weights, *where, spread
    )
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
    check: bool | None = None,
) -> Tensor:
    """Return the whole tree of merges in SciPy's layout, grown on the CPU; arguments as in `cluster`.

    Returns:
        Z (B, N-1, 4) or (N-1, 4), float64 (float32 on MPS): row m merges nodes Z[m, 0] < Z[m, 1] at distance Z[m, 2]
        into node N + m with Z[m, 3] tokens. Distances never decrease down the rows.
        `scipy.cluster.hierarchy.dendrogram(Z.numpy())` draws it.

    >>> linkage(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0., 1., 1., 2.]], dtype=torch.float64)
    """
    data, metric, own_weights, single = _prepare(features, distances, metric, weights, linkage, check)
    tree: Tensor = operators.tree(data, metric, linkage, check, own_weights)
    return tree[0] if single else tree


def cut(tree: Tensor, k: int | Sequence[int] | Tensor) -> Tensor:
    """Return labels (B, N) or (N,) with exactly k groups from a tree of `linkage`, by the order of its merges.

    >>> tree = linkage(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]))
    >>> cut(tree, 2), cut(tree, 1)
    (tensor([0, 0, 1]), tensor([0, 0, 0]))
    """
    if not isinstance(tree, Tensor) or tree.dim() not in (2, 3) or tree.shape[-1] != 4:
        shape = tuple(tree.shape) if isinstance(tree, Tensor) else type(tree).__name__
        raise ValueError(f"tree must be the result of agglo.linkage, (B, N-1, 4) or (N-1, 4), got {shape}")
    single = tree.dim() == 2
    tree = tree.unsqueeze(0) if single else tree
    count = _group_count(k, tree.shape[0], tree.shape[1] + 1, tree.device)
    if not isinstance(count, Tensor):
        count = torch.full((tree.shape[0],), count, dtype=torch.int64, device=tree.device)
    labels = in_torch.cut(tree, count)
    return labels[0] if single else labels


def _prepare(
    features: Tensor | None,
    distances: Tensor | None,
    metric: str,
    weights: Tensor | None,
    linkage: str,
    check: bool | None,
) -> tuple[Tensor, str, Tensor | None, bool]:
    """Return the tensor given as a batch, its metric or "precomputed", weights (B, N), and whether it was one item."""
    # Looked at here first: a call in a forward pass has no wrong options.
    if not (isinstance(metric, str) and metric in METRICS and isinstance(linkage, str) and linkage in LINKAGES):
        choice("metric", metric, METRICS)
        choice("linkage", linkage, LINKAGES)
    if check is not None and not isinstance(check, bool):
        choice("check", check, (None, True, False))
    if (features is None) == (distances is None):
        given = "neither" if features is None else "both"
        raise ValueError(f"give either features or distances, not {given}")
    name, data = ("features", features) if features is not None else ("distances", distances)
    if not isinstance(data, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
    if not (data.is_floating_point() or (name == "distances" and not data.is_complex())):
        raise ValueError(f"{name} must hold real floating point numbers, got dtype {data.dtype}")
    shapes = "(B, H, N, D), (B, N, D) or (N, D)" if name == "features" else "(B, N, N) or (N, N)"
    fits = data.dim() in (2, 3, 4) if name == "features" else data.dim() in (2, 3) and data.shape[-1] == data.shape[-2]
    if not fits or 0 in data.shape[-2:]:
        raise ValueError(f"{name} must have shape {shapes} with at least one token, got {tuple(data.shape)}")
    if weights is not None:
        wanted = (data.shape[0], data.shape[2]) if data.dim() == 4 else tuple(data.shape[:-1])
        if not isinstance(weights, Tensor) or not weights.is_floating_point() or tuple(weights.shape) != wanted:
            given = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"weights must be a floating point tensor, one per token, {wanted}, got {given}")
        if weights.device != data.device:
            raise ValueError(f"weights are on {weights.device}, {name} on {data.device}; both must be on one device")
        weights = weights.detach().to(torch.float32)
    data, single = data.detach(), data.dim() == 2
    if single:
        data, weights = data.unsqueeze(0), None if weights is None else weights.unsqueeze(0)
    return data, (metric if name == "features" else "precomputed"), weights, single


def _group_count(k: int | Sequence[int] | Tensor, batch: int, n_tokens: int, device: torch.device) -> int | Tensor:
    """Return k as one int, or one per item as an int64 tensor (B,) on the device; more than N means N."""
    if isinstance(k, Tensor) and k.dim() == 0 and k.device.type == "cpu":
        k = k.item()  # type: ignore[assignment]
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.dtype == torch.bool:
            raise ValueError(f"k must hold ints, got dtype {k.dtype}")
        ks = k
    elif isinstance(k, Sequence):
        ks = torch.tensor([number("k", each, whole=True, minimum=1) for each in k], dtype=torch.int64)
    else:
        if not isinstance(k, torch.SymInt) and (type(k) is not int or k < 1):
            k = number("k", k, whole=True, minimum=1)
        return min(k, n_tokens)
    if ks.shape != (batch,):
        raise ValueError(f"k must be one int, or one per batch item: shape ({batch},), got shape {tuple(ks.shape)}")
    # On an accelerator a look at the values would wait for the device: there they are only clamped.
    if ks.device.type == "cpu" and bool((ks < 1).any()):
        raise ValueError(f"k={ks.tolist()} must be at least 1 for every item")
    return ks.to(device=device, dtype=torch.int64).clamp(1, n_tokens)


def _grid_and_window(
    grid: tuple[int, int] | None,
    window: int | tuple[int, int] | None,
    connectivity: str | None,
    spread: str,
    n_tokens: int,
    k: int | Tensor | None,
) -> tuple[list[int], list[int]]:
    """Return the sides of the grid and of the window, which are none with connectivity, once all options fit."""
    choice("spread", spread, SPREADS)
    if grid is None:
        name = "window" if window is not None else "connectivity" if connectivity is not None else "spread"
        raise ValueError(f"{name} needs grid=(height, width), the positions of the tokens")
    height, width = whole_numbers("grid", grid, minimum=1, length=2)
    if height * width != n_tokens:
        raise ValueError(f"grid={grid!r} must be (height, width) with height * width = {n_tokens}, all tokens")
    if (window is None) == (connectivity is None):
        given = "neither" if window is None else "both"
        raise ValueError(f"with grid, give either window or connectivity, not {given}")
    if window is None:
        choice("connectivity", connectivity, CONNECTIVITIES)
        if spread != "even":
            raise ValueError(f"spread={spread!r} needs window: it says how groups are spread over windows")
        return [height, width], []
    rows, columns = window_sides(window)
    rows, columns = min(rows, height), min(columns, width)
    n_windows = -(-height // rows) * -(-width // columns)
    if isinstance(k, Tensor):
        raise ValueError("with window, k must be one int for all items")
    if k is not None and k < n_windows:
        raise ValueError(f"k={k} is less than the {n_windows} windows of the grid, which keep at least one group each")
    return [height, width], [rows, columns]


def window_sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a window, from one number for both or from two."""
    if not isinstance(window, (tuple, list)):
        window = (number("window", window, whole=True, minimum=1),) * 2
    rows, columns = whole_numbers("window", window, minimum=1, length=2)
    return rows, columns
