"""Baselines that ignore what the image shows: random dropping, pooling, rings around the centre, and cutting off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import choice, number
from agglo.compiling import constant_result
from agglo.grouping import MEANS, Grouping, Mean
from agglo.methods.base import Grid, Kind, Method, Outcome, Place, View, require_grid
from agglo.methods.registry import register


@register
class RandomDropping(Method):
    """Patches are dropped at random, each image its own.

    seed: None draws from torch's generator, anew at every pass; a number makes every pass draw the same.
    """

    name: ClassVar[str] = "random"
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"

    def __init__(self, seed: int | None = None) -> None:
        self.seed = None if seed is None else number("seed", seed, whole=True)

    def reduce(self, view: View) -> Outcome:
        device, generator = view.tokens.device, None
        if self.seed is not None:
            # One for each call, since two threads may run one model.
            generator = torch.Generator(device).manual_seed(self.seed + view.stage)
        return Outcome(view.keep_best(torch.rand(view.patches.shape[:2], device=device, generator=generator)))


@register
class Slice(Method):
    """The first tokens stay and the others join the last of them on paper; nothing is compared or averaged.

    Token reduction at no cost: the time that a model's blocks take with so many tokens.
    """

    name: ClassVar[str] = "free"
    listed: ClassVar[bool] = False

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        left = view.prefix + view.target
        labels = Grouping.identity(view.tokens).labels.clamp(max=left - 1)
        sizes = torch.ones(len(labels), left, device=labels.device)
        return Outcome(Grouping(labels, sizes, view.prefix), tokens=view.tokens[:, :left])


class FixedPattern(Method):
    """The patches nearest to the centre stay, the study's baselines; the study hid the others from attention by a mask.

    Only whole rings of equally far patches can be kept: of their counts the nearest to the one asked for is taken, of
    two equally near ones the smaller. Coordinates are rounded to float32 as in the study's code, which splits some
    rings: of 14 x 14 patches l1 can keep 68 or 92, and not only 60, 84 or 112.
    """

    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    reads_grid: bool = True
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "rings around the centre, some split by rounding; the nearest count is taken"
    reference: ClassVar[str] = "Haurum et al., Which Tokens to Use?, ICCV workshops 2023"

    def stages(self, n_tokens: int, asked: Sequence[int], grid: Grid | None) -> list[int]:
        nearest_first = sorted(ring_distances(self.name, require_grid(self, grid, n_tokens)))
        # A count is whole rings where the next patch is farther away.
        counts = [n for n in range(1, n_tokens) if nearest_first[n - 1] < nearest_first[n]] + [n_tokens]
        return _nearest(counts, asked)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.grid is not None
        batch, n_patches = view.patches.shape[:2]
        distances = ring_distances(self.name, view.grid)
        nearest_first = sorted(distances)
        here = [distance for distance in distances if distance <= nearest_first[n_patches - 1]]
        kept = [position for position, distance in enumerate(here) if distance <= nearest_first[view.target - 1]]
        return Outcome(view.keep(torch.tensor(kept, device=view.tokens.device).expand(batch, -1)))


def _nearest(counts: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Return the counts nearest to those asked for, of two equally near ones the smaller."""
    return [min(counts, key=lambda count: (abs(count - target), count)) for target in asked]


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda y, x: y.abs() + x.abs(),
    "l2": lambda y, x: (y * y + x * x).sqrt(),
    "linf": lambda y, x: torch.maximum(y.abs(), x.abs()),
}


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
        return _nearest(list(_coarser(require_grid(self, grid, n_tokens))), asked)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.grid is not None
        batch, n_patches = view.patches.shape[0], int(view.patches.shape[1])  # a tensor, while TorchScript watches
        shapes = [_coarser(view.grid)[count] for count in (*view.tokens_before, n_patches, view.target)]
        rows, columns = (_cells([shape[axis] for shape in shapes]) for axis in (0, 1))
        labels = torch.tensor([row * shapes[-1][1] + column for row in rows for column in columns])
        return Outcome(view.group(labels.to(view.tokens.device).expand(batch, n_patches)), mean=self.mean)


@register
class DCT(Method):
    """The sequence of patches is cut off in the frequency domain: its highest frequencies go, whatever the image shows.

    With a discrete cosine transform along the sequence, of N coefficients for each channel the first K stay, and the
    inverse transform of these makes K tokens.
    """

    name: ClassVar[str] = "dct"
    proportional: bool = False
    kind: ClassVar[Kind] = "merges soft"
    reference: ClassVar[str] = "He et al., Fourier Transformer, ACL Findings 2023"

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        batch, n_patches = view.patches.shape[0], int(view.patches.shape[1])
        weights = truncation(n_patches, view.target).to(view.tokens.device)
        with torch.autocast(view.tokens.device.type, enabled=False):
            tokens = (weights @ view.patches.float()).to(view.tokens.dtype)
        labels = torch.arange(n_patches, device=weights.device) * view.target // n_patches
        return Outcome(
            view.group(labels.expand(batch, -1)),
            torch.cat([view.tokens[:, : view.prefix], tokens], dim=1),
            weights=weights.expand(batch, -1, -1),
        )


def truncation(n_in: int, n_out: int) -> Tensor:
    """Return the matrix (n_out, n_in) that cuts a sequence off in the frequency domain; its rows add up to 1."""
    forwards, back = cosines(n_in)[:n_out], cosines(n_out)
    return (back.T @ forwards * (n_out / n_in) ** 0.5).float()


def cosines(n: int) -> Tensor:
    """Return the orthonormal discrete cosine transform (n, n) of a sequence."""
    positions = torch.arange(n, dtype=torch.float64)
    matrix = (torch.pi / n * (positions + 0.5) * positions.unsqueeze(1)).cos() * (2 / n) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


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
