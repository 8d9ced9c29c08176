"""Fixed patterns: rings of patches around the image's centre, the study's baselines that ignore the image.

The study hid the outer patches from a block's attention by a mask; they are dropped before the block here, which leaves
the others the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from agglo.compiling import constant_result
from agglo.methods.base import Grid, Kind, Method, Outcome, View, require_grid
from agglo.methods.registry import register

_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda y, x: y.abs() + x.abs(),
    "l2": lambda y, x: (y * y + x * x).sqrt(),
    "linf": lambda y, x: torch.maximum(y.abs(), x.abs()),
}


class FixedPattern(Method):
    """The patches nearest to the centre stay.

    Only whole rings of equally far patches can be kept: of their counts the nearest to the one asked for is taken, of
    two equally near ones the smaller. Coordinates are rounded to float32 as in the study's code, which splits some
    rings: of 14 x 14 patches l1 can keep 68 or 92, and not only 60, 84 or 112.
    """

    place = "before_block"
    proportional: bool = False
    reads_grid: bool = True
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "rings around the centre, some split by rounding; the nearest count is taken"
    reference: ClassVar[str] = "Haurum et al., Which Tokens to Use?, ICCV workshops 2023"

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        nearest_first = sorted(ring_distances(self.name, require_grid(self, grid, n_tokens)))
        # A count is whole rings where the next patch is farther away.
        counts = [n for n in range(1, n_tokens) if nearest_first[n - 1] < nearest_first[n]] + [n_tokens]
        return [min(counts, key=lambda count: (abs(count - target), count)) for target in asked]

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.grid is not None
        batch, n_patches = view.patches.shape[:2]
        distances = ring_distances(self.name, view.grid)
        nearest_first = sorted(distances)
        now, then = nearest_first[n_patches - 1], nearest_first[view.target - 1]
        here = [distance for distance in distances if distance <= now]
        kept = [position for position, distance in enumerate(here) if distance <= then]
        positions = torch.tensor(kept, device=view.tokens.device).expand(batch, -1)
        return Outcome(view.keep(positions))


@constant_result
def ring_distances(norm: str, grid: Grid) -> list[float]:
    """Return the distance of every patch from the centre, row by row, as the study spaced them."""
    coordinates = [torch.linspace(-n / 2, n / 2, n, dtype=torch.float32, device="cpu") for n in grid]
    y, x = torch.meshgrid(*coordinates, indexing="ij")
    distances: list[float] = _DISTANCES[norm](y, x).flatten().tolist()
    return distances


@register
class L1(FixedPattern):
    """The patches nearest to the centre by |x| + |y| stay, a diamond."""

    name: ClassVar[str] = "l1"


@register
class L2(FixedPattern):
    """The patches nearest to the centre by the root of x^2 + y^2 stay, a disc."""

    name: ClassVar[str] = "l2"


@register
class LInf(FixedPattern):
    """The patches nearest to the centre by max(|x|, |y|) stay, a square."""

    name: ClassVar[str] = "linf"
