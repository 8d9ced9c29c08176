"""Plain 2-D pooling of tokens: the yardstick that every merging method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from agglo.grouping import Grouping
from agglo.methods.base import Grid, Method, Outcome, View, require_grid
from agglo.methods.registry import register


@register
class Pooling(Method):
    """The grid of patches is averaged down to a coarser grid of the same shape, whatever the image shows."""

    name: ClassVar[str] = "pool"
    reach: ClassVar[str] = "coarser grids of the same shape; the one nearest to the keep rate is taken"

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        """Of equally near counts the smaller. Of 14 x 14 patches 98 are asked for, 10 x 10 are left."""
        counts = list(_coarser(require_grid(self, grid, n_tokens)))
        return [min(counts, key=lambda count: (abs(count - target), count)) for target in asked]

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.grid is not None
        batch, n_patches = view.patches.shape[:2]
        shapes = _coarser(view.grid)
        (rows, columns), (fewer_rows, fewer_columns) = shapes[n_patches], shapes[view.target]
        position = torch.arange(n_patches, device=view.tokens.device)
        cell_row = position // columns * fewer_rows // rows
        cell_column = position % columns * fewer_columns // columns
        cells = (cell_row * fewer_columns + cell_column).expand(batch, n_patches)
        return Outcome(Grouping.of(cells, view.target, view.prefix, view.sizes))


def _coarser(grid: Grid) -> dict[int, Grid]:
    """The grids from one row up to the given one, in its shape as nearly as can be, by their counts, which all differ.

    >>> _coarser((2, 3))
    {2: (1, 2), 6: (2, 3)}
    """
    rows, columns = grid
    # Half a column rounds up, in whole numbers.
    shapes = [(r, max(1, (2 * columns * r + rows) // (2 * rows))) for r in range(1, rows + 1)]
    return {r * c: (r, c) for r, c in shapes}
