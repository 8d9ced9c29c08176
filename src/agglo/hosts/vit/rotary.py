"""Rotary position embeddings for merged tokens: a merged token takes the size-weighted mean position of its members, a
soft one the mean position of all tokens by how much of them is in it.

Libraries hand out tables of sines and cosines at the grid's points. Angles are linear in the position, so the step of
each channel along rows and columns is read off the table, and a mean position between grid points gets its own angle.
A step is only known up to whole turns: the smallest is taken, the smoothest rotation through the same grid points.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agglo.grouping import Grouping


class Positions(ABC):
    """Where tokens are, for a model whose attention asks. Hosts hand it to `run_blocks`; `Parts` get its table."""

    @abstractmethod
    def table(self, block: int) -> Tensor | None:
        """What `Parts` of a block are told of the tokens at hand."""

    @abstractmethod
    def merged(self, grouping: Grouping, weights: Tensor | None = None) -> Positions:
        """The same after a merge. weights: (B, K, N), of the patch tokens in the new ones, where they are mixed."""


@dataclass(frozen=True)
class Rotary(Positions):
    """tables: per block (or one for all) the sines and cosines (..., N, 2d) at the N points of the patches.
    grid: (rows, columns), where the N patches come row by row.
    positions: (B, G, A) of the merged patch tokens; None while every token sits on its own point.
    points: (N, A) whole numbers, where patches come in another order or have another number of axes; then grid is None.
    front: (prefix, 2d), of prefix tokens that are rotated too, or None.
    """

    tables: Tensor | list[Tensor]
    grid: tuple[int, int] | None
    prefix: int
    positions: Tensor | None = None
    points: Tensor | None = None
    front: Tensor | None = None

    def table(self, block: int) -> Tensor:
        """Sines and cosines for a block: the library's table itself, or (B, heads or 1, G, 2d) for merged tokens."""
        table = self.tables[block] if isinstance(self.tables, list) else self.tables
        if self.positions is not None:
            where = self.grid if self.points is None else self.points
            assert where is not None
            table = rotate_to(self.positions, table, where)
        if self.front is None:
            return table
        return torch.cat([self.front.expand(*table.shape[:-2], -1, -1), table], dim=-2)

    def merged(self, grouping: Grouping, weights: Tensor | None = None) -> Rotary:
        points = _row_by_row(self.grid, grouping.labels.device) if self.points is None else self.points
        return replace(self, positions=mean_positions(self.positions, points, grouping, weights))


@dataclass(frozen=True)
class Places(Positions):
    """For blocks that work out the rotation themselves: the positions (B, G, A) are the table; None before any merge.

    points: (N, A) of the patches.
    """

    points: Tensor
    positions: Tensor | None = None

    def table(self, block: int) -> Tensor | None:
        return self.positions

    def merged(self, grouping: Grouping, weights: Tensor | None = None) -> Places:
        return replace(self, positions=mean_positions(self.positions, self.points, grouping, weights))


def _row_by_row(grid: tuple[int, int] | None, device: torch.device) -> Tensor:
    assert grid is not None
    index = torch.arange(grid[0] * grid[1], device=device)
    return torch.stack([index // grid[1], index % grid[1]], dim=-1)


def mean_positions(positions: Tensor | None, points: Tensor, grouping: Grouping, weights: Tensor | None) -> Tensor:
    """Positions (B, K, A) after a merge of tokens at positions (B, N, A), or at points (N, A) if nothing merged yet."""
    if positions is None:
        positions = points.float().expand(grouping.labels.shape[0], -1, -1)
    if weights is not None:
        shares = weights.detach().float()
        shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        with torch.autocast(shares.device.type, enabled=False):
            return shares @ positions
    padded = torch.cat([positions.new_zeros(positions.shape[0], grouping.prefix, positions.shape[2]), positions], dim=1)
    return grouping.merge(padded)[:, grouping.prefix :]


def rotate_to(positions: Tensor, table: Tensor, where: tuple[int, int] | Tensor) -> Tensor:
    """Sines and cosines (B, heads or 1, G, 2d) at positions (B, G, A), from a table (N, 2d) or (heads, N, 2d).

    where: the grid (rows, columns) that the table's N points fill row by row, or the points (N, A) themselves.
    """
    sine, cosine = table.float().chunk(2, dim=-1)
    angles = torch.atan2(sine, cosine)
    origin = angles[..., :1, :]
    if isinstance(where, Tensor):
        first = where[0]
        neighbours = [_index_of(where, first + unit) for unit in torch.eye(where.shape[1], device=where.device).long()]
        offsets = positions - first
    else:
        neighbours, offsets = [where[1] if where[0] > 1 else None, 1 if where[1] > 1 else None], positions
    angle = origin
    for offset, neighbour in zip(offsets.unsqueeze(1).unbind(dim=-1), neighbours, strict=True):  # (B, 1, G) each
        if neighbour is not None:
            turn = angles[..., neighbour : neighbour + 1, :] - origin
            step = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            angle = angle + offset.unsqueeze(-1) * step
    if angle is origin:
        angle = origin + torch.zeros_like(positions[:, None, :, :1])
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(table.dtype)


def _index_of(points: Tensor, point: Tensor) -> int | None:
    """Where a point is among others, if it is."""
    found = (points == point).all(dim=1).nonzero()
    return int(found[0]) if len(found) else None
