"""Rotary position embeddings for merged tokens: a merged token takes the size-weighted mean position of its members, a
soft one the mean position of all tokens by how much of them is in it.

Libraries hand out tables of sines and cosines at the grid's points. Angles are linear in the position, so the step of
each channel along rows and columns is read off the table, and a mean position between grid points gets its own angle.
A step is only known up to whole turns: the smallest is taken, the smoothest rotation through the same grid points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agglo.grouping import Grouping


@dataclass(frozen=True)
class Rotary:
    """tables: per block (or one for all) the sines and cosines (..., N, 2d) at the N = rows * columns grid points.
    positions: (B, G, 2) of the merged patch tokens; None while every token sits on its grid point.
    """

    tables: Tensor | list[Tensor]
    grid: tuple[int, int]
    prefix: int
    positions: Tensor | None = None

    def table(self, block: int) -> Tensor:
        """Sines and cosines for a block: the library's table itself, or (B, heads or 1, G, 2d) for merged tokens."""
        table = self.tables[block] if isinstance(self.tables, list) else self.tables
        return table if self.positions is None else rotate_to(self.positions, table, self.grid)

    def merged(self, grouping: Grouping, weights: Tensor | None = None) -> Rotary:
        """The same after a merge. weights: (B, K, N), of the patch tokens in the new ones, where they are mixed."""
        positions = self.positions
        if positions is None:
            rows, columns = self.grid
            index = torch.arange(rows * columns, device=grouping.labels.device)
            points = torch.stack([index // columns, index % columns], dim=-1).float()
            positions = points.expand(grouping.labels.shape[0], -1, -1)
        if weights is not None:
            shares = weights.detach().float()
            shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            with torch.autocast(shares.device.type, enabled=False):
                return Rotary(self.tables, self.grid, self.prefix, shares @ positions)
        padded = torch.cat([positions.new_zeros(positions.shape[0], self.prefix, 2), positions], dim=1)
        return Rotary(self.tables, self.grid, self.prefix, grouping.merge(padded)[:, self.prefix :])


def rotate_to(positions: Tensor, table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sines and cosines (B, heads or 1, G, 2d) at positions (B, G, 2), from a table (N, 2d) or (heads, N, 2d)."""
    sine, cosine = table.float().chunk(2, dim=-1)
    angles = torch.atan2(sine, cosine)
    origin = angles[..., :1, :]

    def step(neighbour: int) -> Tensor:
        turn = angles[..., neighbour : neighbour + 1, :] - origin
        return torch.remainder(turn + math.pi, 2 * math.pi) - math.pi

    down = step(grid[1]) if grid[0] > 1 else torch.zeros_like(origin)
    right = step(1) if grid[1] > 1 else torch.zeros_like(origin)
    row, column = positions.unsqueeze(1).unbind(dim=-1)  # (B, 1, G)
    angle = origin + row.unsqueeze(-1) * down + column.unsqueeze(-1) * right
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(table.dtype)
