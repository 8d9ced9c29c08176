"""Clustering of tokens on a grid, exact within windows or with merges of neighbours only, as one torch operator.

Why an operator: see `clustering/linkage/operators.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from agglo.checks import choice, number, whole_numbers
from agglo.clustering import dispatch
from agglo.clustering.grid import windows
from agglo.clustering.grid.edges import edge_distances
from agglo.clustering.linkage.operators import Request, fake_labels

if TYPE_CHECKING:
    from types import ModuleType

CONNECTIVITIES = ("grid",)
SPREADS = ("even", "need")
_BACKENDS = {
    "reference": "agglo.clustering.grid.reference",
    "cpu": "agglo.clustering.grid.cpu",
    "torch": "agglo.clustering.grid.torch",
}


class Place(NamedTuple):
    """Where the tokens stand, and which of them may merge."""

    height: int
    width: int
    window: list[int]  # (height, width) within which groups merge; []: neighbouring groups merge, anywhere
    spread: str  # how k groups are spread over windows


def place_of(
    grid: tuple[int, int] | None,
    window: int | tuple[int, int] | None,
    connectivity: str | None,
    spread: str,
    n_tokens: int,
    k: int | Tensor | None,
) -> Place:
    """Check the arguments of `agglo.cluster` that concern a grid against each other.

    Raises:
        ValueError: if one of them is missing, wrong, or does not fit the others.
    """
    choice("spread", spread, SPREADS)
    if grid is None:
        given = f"window={window!r}" if window is not None else f"connectivity={connectivity!r}"
        raise ValueError(f"{given} needs grid=(height, width), the positions of the tokens")
    height, width = whole_numbers("grid", grid, minimum=1, length=2)
    if height * width != n_tokens:
        raise ValueError(
            f"grid={grid!r} must be (height, width) with height * width = {n_tokens}, the number of tokens"
        )
    if (window is None) == (connectivity is None):
        raise ValueError(
            f"with grid, give either window or connectivity, not {'neither' if window is None else 'both'}"
        )
    if window is None:
        choice("connectivity", connectivity, CONNECTIVITIES)
        if spread != "even":
            raise ValueError(f"spread={spread!r} needs window: it says how groups are spread over windows")
        return Place(height, width, [], spread)
    rows, columns = window_sides(window)
    sides = min(rows, height), min(columns, width)
    n_windows = -(-height // sides[0]) * -(-width // sides[1])
    if isinstance(k, Tensor):
        raise ValueError("with window, k must be one int for all items")
    if k is not None and k < n_windows:
        raise ValueError(
            f"k={k} is less than the {n_windows} windows of {sides[0]} x {sides[1]} on a grid of {height} x {width}: "
            "every window keeps at least one group"
        )
    return Place(height, width, list(sides), spread)


def window_sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a window, from one number for both or from two."""
    if isinstance(window, (tuple, list)):
        rows, columns = whole_numbers("window", window, minimum=1, length=2)
        return rows, columns
    side = number("window", window, whole=True, minimum=1)
    return side, side


def _load(backend: str, device: torch.device) -> ModuleType:
    asked = backend or os.environ.get(dispatch.VARIABLE) or ""
    name = dispatch.choose(asked, device) if asked else ("cpu" if device.type == "cpu" else "torch")
    if name not in _BACKENDS:
        raise ValueError(f"backend={name!r} has no connectivity='grid'; accepted: {', '.join(map(repr, _BACKENDS))}")
    return dispatch.import_module(_BACKENDS[name])


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
    height: int,
    width: int,
    window: list[int],
    spread: str,
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and group counts (B,) for the fields of a `Request` and of a `Place`."""
    request = Request(data, metric, linkage, k, ks, threshold, check, backend, weights)
    request.validate()
    if window:
        module = dispatch.load(backend, data.device)
        labels = windows.labels(request, (height, width), (window[0], window[1]), spread, module)
    else:
        lengths = edge_distances(data, metric, height, width, weights)
        lengths = lengths.nan_to_num(nan=1e38, posinf=1e38, neginf=-1e38)
        labels = _load(backend, data.device).labels(lengths, height, width, linkage, request.counts(), threshold)
    return labels, labels.amax(dim=1) + 1


cluster.register_fake(fake_labels)
