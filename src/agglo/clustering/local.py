"""Clustering of tokens on a grid: exact within windows, or with merges of neighbours only. As one torch operator, for
the reasons that `ops.py` gives."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agglo.clustering import dispatch, windows
from agglo.clustering.arguments import choice
from agglo.clustering.distances import pairwise, weighted
from agglo.clustering.grid_edges import edge_distances
from agglo.clustering.ops import check_distances, check_features_and_weights

if TYPE_CHECKING:
    from types import ModuleType

CONNECTIVITIES = ("grid",)
SPREADS = ("even", "need")
_ON_GRID = {
    "reference": "agglo.clustering.grid_reference",
    "cpu": "agglo.clustering.cpu.grid",
    "torch": "agglo.clustering.torch_grid",
}


def grid_arguments(
    grid: tuple[int, int] | None,
    window: int | tuple[int, int] | None,
    connectivity: str | None,
    spread: str,
    n_tokens: int,
    k: int | Tensor | None,
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The grid, and the window or None, once all of it fits together."""
    choice("spread", spread, SPREADS)
    if grid is None:
        given = f"window={window!r}" if window is not None else f"connectivity={connectivity!r}"
        raise ValueError(f"{given} needs grid=(height, width), the places of the tokens")
    if len(grid) != 2 or not all(_is_count(side) for side in grid) or grid[0] * grid[1] != n_tokens:
        raise ValueError(
            f"grid={grid!r} must be (height, width) with height * width = {n_tokens}, the number of tokens"
        )
    if (window is None) == (connectivity is None):
        raise ValueError(
            f"with grid, give either window or connectivity, not {'neither' if window is None else 'both'}"
        )
    height, width = grid
    if window is None:
        choice("connectivity", connectivity, CONNECTIVITIES)
        if spread != "even":
            raise ValueError(f"spread={spread!r} needs window: it says how groups are spread over windows")
        return (height, width), None
    sides = (window, window) if isinstance(window, int) else window
    if not isinstance(sides, (tuple, list)) or len(sides) != 2 or not all(_is_count(side) for side in sides):
        raise ValueError(f"window={window!r} must be an int >= 1 or (height, width) of such")
    sides = min(sides[0], height), min(sides[1], width)
    n_windows = -(-height // sides[0]) * -(-width // sides[1])
    if isinstance(k, Tensor):
        raise ValueError("with window, k must be one int for all items")
    if k is not None and k < n_windows:
        raise ValueError(
            f"k={k} is less than the {n_windows} windows of {sides[0]} x {sides[1]} on a grid of {height} x {width}: "
            "every window keeps at least one group"
        )
    return (height, width), sides


def _is_count(side: object) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side >= 1


def _on_grid(backend: str, device: torch.device) -> ModuleType:
    asked = backend or os.environ.get(dispatch.VARIABLE) or ""
    name = dispatch.choose(asked, device) if asked else ("cpu" if device.type == "cpu" else "torch")
    if name not in _ON_GRID:
        raise ValueError(f"backend={name!r} has no connectivity='grid'; accepted: {', '.join(map(repr, _ON_GRID))}")
    return dispatch.import_module(_ON_GRID[name])


@torch.library.custom_op("agglo::cluster_local", mutates_args=())
def cluster_local(
    data: Tensor,
    metric: str,
    linkage: str,
    height: int,
    width: int,
    window: list[int],
    spread: str,
    k: int | None,
    ks: Tensor | None,
    threshold: float | None,
    check: bool | None,
    backend: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) of tokens on a grid, with float32 weights (B, N) if any.

    window [] lets neighbouring groups merge only.
    """
    if check or (check is None and data.device.type == "cpu"):
        check_features_and_weights(data, metric, weights)
        if metric == "precomputed":
            check_distances(data.to(torch.float32).contiguous(), data.dtype)
    if window:
        labels = _in_windows(
            data, metric, linkage, (height, width), (window[0], window[1]), spread, k, threshold, backend, weights
        )
    else:
        if k is not None:
            ks = torch.full((len(data),), k, dtype=torch.int64, device=data.device)
        lengths = edge_distances(data, metric, height, width, weights)
        lengths = lengths.nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38)
        labels = _on_grid(backend, data.device).labels(lengths, height, width, linkage, ks, threshold)
    return labels, labels.amax(dim=1) + 1


@cluster_local.register_fake
def _(
    data: Tensor,
    metric: str,
    linkage: str,
    height: int,
    width: int,
    window: list[int],
    spread: str,
    k: int | None,
    ks: Tensor | None,
    threshold: float | None,
    check: bool | None,
    backend: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, n_tokens = data.shape[:2]
    labels = data.new_empty((batch, n_tokens), dtype=torch.int64)
    return labels, data.new_empty((batch,), dtype=torch.int64)


def _in_windows(
    data: Tensor,
    metric: str,
    linkage: str,
    grid: tuple[int, int],
    window: tuple[int, int],
    spread: str,
    k: int | None,
    threshold: float | None,
    backend: str,
    weights: Tensor | None,
) -> Tensor:
    module = dispatch.load(backend, data.device)
    return windows.labels(
        partial(_distances_within, data, metric, weights),
        len(data),
        data.device,
        grid,
        window,
        spread,
        lambda distances, counts: module.labels(distances, linkage, counts, threshold),
        lambda distances: module.tree(distances, linkage),
        k,
    )


def _distances_within(data: Tensor, metric: str, weights: Tensor | None, tokens: Tensor) -> Tensor:
    """Float32 distances (B * W, T, T) within windows of tokens (W, T), from features or distances of all tokens."""
    if metric == "precomputed":
        distances = data[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].to(torch.float32).flatten(0, 1).contiguous()
    else:
        distances = pairwise(data[:, tokens].flatten(0, 1), metric)
    return distances if weights is None else weighted(distances, weights[:, tokens].flatten(0, 1))
