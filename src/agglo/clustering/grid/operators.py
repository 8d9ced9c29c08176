"""Clustering of tokens on a grid, exact within windows or with merges of neighbours only, as one torch operator.

Why an operator: see `clustering/linkage/operators.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.checks import choice, number, whole_numbers
from agglo.clustering import dispatch
from agglo.clustering.grid import windows
from agglo.clustering.grid.edges import edge_distances
from agglo.clustering.linkage.operators import Request, fake_labels

CONNECTIVITIES = ("grid",)
SPREADS = ("even", "need")


def grid_options(
    grid: tuple[int, int] | None,
    window: int | tuple[int, int] | None,
    connectivity: str | None,
    spread: str,
    n_tokens: int,
    k: int | Tensor | None,
) -> dict[str, list[int] | str]:
    """Check the arguments of `agglo.cluster` that concern a grid, and return the grid options of `cluster` below.

    Raises:
        ValueError: if one of them is missing, wrong, or does not fit the others.
    """
    choice("spread", spread, SPREADS)
    if grid is None:
        given = f"window={window!r}" if window is not None else f"connectivity={connectivity!r}"
        raise ValueError(f"{given} needs grid=(height, width), the positions of the tokens")
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
        return {"grid": [height, width], "window": [], "spread": spread}
    rows, columns = window_sides(window)
    rows, columns = min(rows, height), min(columns, width)
    n_windows = -(-height // rows) * -(-width // columns)
    if isinstance(k, Tensor):
        raise ValueError("with window, k must be one int for all items")
    if k is not None and k < n_windows:
        raise ValueError(
            f"k={k} is less than the {n_windows} windows of {rows} x {columns} on a grid of {height} x {width}: "
            "every window keeps at least one group"
        )
    return {"grid": [height, width], "window": [rows, columns], "spread": spread}


def window_sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a window, from one number for both or from two."""
    if isinstance(window, (tuple, list)):
        rows, columns = whole_numbers("window", window, minimum=1, length=2)
        return rows, columns
    side = number("window", window, whole=True, minimum=1)
    return side, side


@torch.library.custom_op("agglo::cluster_on_grid", mutates_args=())
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
    *,
    grid: list[int],
    window: list[int],
    spread: str,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) for the fields of a `Request` on a grid.

    Args:
        data, metric, linkage, k, ks, threshold, check, backend, weights: the fields of a `Request`.
        grid: (height, width) of the tokens.
        window: (height, width) within which groups merge; empty: neighbouring groups merge, anywhere.
        spread: how k groups are divided among windows.
    """
    request = Request(data, metric, linkage, k, ks, threshold, check, backend, weights)
    request.validate()
    height, width = grid
    if window:
        labels = windows.labels(request, (height, width), (window[0], window[1]), spread)
    else:
        lengths = edge_distances(data, metric, (height, width), weights)
        lengths = lengths.nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38).cpu()
        # A heap of edges on the CPU serves every device: rounds on a GPU would wait for the host some 60 times.
        own = "reference" if dispatch.choose(backend or None, data.device) == "reference" else "cpu"
        module = dispatch.import_module(f"agglo.clustering.grid.{own}")
        counts = request.counts()
        labels = module.labels(lengths, (height, width), linkage, None if counts is None else counts.cpu(), threshold)
    return labels.to(data.device), labels.amax(dim=1).to(data.device) + 1


cluster.register_fake(fake_labels)
