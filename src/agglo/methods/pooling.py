"""Plain 2-D pooling of tokens: the baseline of every merging method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from agglo.checks import choice
from agglo.grouping import MEANS, Mean
from agglo.methods.base import Grid, Method, Outcome, View, require_grid
from agglo.methods.registry import register


@register
class Pooling(Method):
    """The grid of patches is averaged down to a coarser grid of the same shape, whatever the image shows.

    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    """

    name: ClassVar[str] = "pool"
    reads_grid: bool = True
    reach: ClassVar[str] = "coarser grids of the same shape; the one nearest to the keep rate is taken"

    def __init__(self, mean: Mean = "plain") -> None:
        self.mean = choice("mean", mean, MEANS)

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        """Take the nearest count, of two equally near ones the smaller: of 14 x 14 patches 98 become 10 x 10."""
        counts = list(_coarser(require_grid(self, grid, n_tokens)))
        return [min(counts, key=lambda count: (abs(count - target), count)) for target in asked]

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.grid is not None
        batch, n_patches = view.patches.shape[0], int(view.patches.shape[1])  # a tensor, while TorchScript watches
        shapes = [_coarser(view.grid)[count] for count in (*view.tokens_before, n_patches, view.target)]
        rows, columns = (_cells([shape[axis] for shape in shapes]) for axis in (0, 1))
        labels = torch.tensor([row * shapes[-1][1] + column for row in rows for column in columns])
        labels = labels.to(view.tokens.device).expand(batch, n_patches)
        return Outcome(view.group(labels), mean=self.mean)


def _cells(lengths: list[int]) -> list[int]:
    """Return which of lengths[-1] cells each of the lengths[-2] cells before joins, on an axis of lengths[0] patches.

    A cell joins the one its centre lies in, moved as little as it takes for none to stay empty, so that cells cover
    about the same number of patches however many poolings came before.

    >>> _cells([6, 4, 2])
    [0, 0, 1, 1]
    """
    extents = [1] * lengths[0]  # patches that each cell covers
    cells: list[int] = []
    for length in lengths[1:]:
        cells, covered = [], 0
        for index, extent in enumerate(extents):
            centre = (2 * covered + extent) * length // (2 * lengths[0])
            least = max(cells[-1] if cells else 0, length - (len(extents) - index))
            most = cells[-1] + 1 if cells else 0
            cells.append(min(max(centre, least), most))
            covered += extent
        extents = [sum(e for e, cell in zip(extents, cells, strict=True) if cell == each) for each in range(length)]
    return cells


def _coarser(grid: Grid) -> dict[int, Grid]:
    """Return the grids from one row up to the given one, of nearly its shape, by their counts, which all differ.

    >>> _coarser((2, 3))
    {2: (1, 2), 6: (2, 3)}
    """
    rows, columns = grid
    # Half a column rounds up, in whole numbers.
    shapes = [(r, max(1, (2 * columns * r + rows) // (2 * rows))) for r in range(1, rows + 1)]
    return {r * c: (r, c) for r, c in shapes}
