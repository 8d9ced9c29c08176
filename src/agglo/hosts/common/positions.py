"""Positions of merged tokens: rotary position embeddings and relative position bias.

Rotary: a merged token takes the size-weighted mean position of its members. Libraries hand out tables of sines and
cosines at the grid's points. Angles are linear in the position, so the step of each channel along rows and columns is
read off the table, and a mean position between grid points gets its own angle. A step is only known up to whole turns:
the smallest is taken.

Relative: with S (B, G, T) the shares of the T first tokens in the G tokens left, whose rows sum to 1, a table b (H,
T, T) becomes S b S^T: the bias between two merged tokens is the mean over all pairs of their members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Grid


@dataclass(frozen=True)
class Positions:
    """Positions of the patch tokens of a model with rotary position embeddings."""

    points: Grid | Tensor  # the grid that the rows of a block's table fill row by row, or their points (N, A), integers
    merged: Tensor | None = None  # (B, G, A) of merged tokens; None while every token is at its own point
    n_front: int = 0  # rows of the table in front that belong to prefix tokens

    def table(self, table: Tensor | None) -> Tensor | None:
        """Return the sines and cosines for the tokens that are left: the table itself, then (B, heads or 1, G, 2d).

        The table is what the library hands the block, (..., N, 2d). For a block that computes the rotation itself it is
        None, and the positions are returned.
        """
        if table is None or self.merged is None:
            return self.merged if table is None else table
        front = table[..., : self.n_front, :]
        table = rotate_to(self.merged, table[..., self.n_front :, :], self.points)
        return torch.cat([front.expand(*table.shape[:-2], -1, -1), table], dim=-2) if self.n_front else table

    def after(self, grouping: Grouping, weights: Tensor | None = None) -> Positions:
        """Return the positions after a merge. weights: (B, K, N), of patch tokens in the new ones, where mixed."""
        positions = self.merged
        if positions is None:
            points = self.points
            if not isinstance(points, Tensor):
                index = torch.arange(points[0] * points[1], device=grouping.labels.device)
                points = torch.stack([index // points[1], index % points[1]], dim=-1)
            positions = points.float().expand(grouping.labels.shape[0], -1, -1)
        if weights is not None:
            return replace(self, merged=_mix(weights, positions))
        zeros = positions.new_zeros(positions.shape[0], grouping.prefix, positions.shape[2])
        merged = grouping.merge(torch.cat([zeros, positions], dim=1))[:, grouping.prefix :]
        return replace(self, merged=merged)


@dataclass(frozen=True)
class RelativeBias:
    """Shares (B, G, T) of the first tokens in those that are left; None while they are these."""

    shares: Tensor | None = None

    def between(self, table: Tensor) -> Tensor:
        """Return the bias between the tokens that are left, given that of the first tokens, (1 or B, H or 1, T, T)."""
        if self.shares is None:
            return table
        with torch.autocast(table.device.type, enabled=False):
            shares = self.shares.unsqueeze(1)
            return (shares @ table.float() @ shares.transpose(-2, -1)).to(table.dtype)

    def after(self, grouping: Grouping, weights: Tensor | None = None) -> RelativeBias:
        """Return the shares after a merge. weights: (B, K, N), of patch tokens in the new ones, where mixed."""
        shares = self.shares
        if shares is None:
            batch, n_tokens = grouping.labels.shape
            shares = torch.eye(n_tokens, device=grouping.labels.device).expand(batch, -1, -1)
        if weights is None:
            return RelativeBias(grouping.merge(shares))
        front = grouping.prefix
        return RelativeBias(torch.cat([shares[:, :front], _mix(weights, shares[:, front:])], dim=1))


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return the means (B, K, A) of values (B, N, A) by weights (B, K, N)."""
    shares = weights.detach().float()
    shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    with torch.autocast(shares.device.type, enabled=False):
        return shares @ values


def rotate_to(positions: Tensor, table: Tensor, points: Grid | Tensor) -> Tensor:
    """Return sines and cosines (B, heads or 1, G, 2d) at positions (B, G, A), from a table ([heads,] N, 2d)."""
    sine, cosine = table.float().chunk(2, dim=-1)
    angles = torch.atan2(sine, cosine)
    origin = angles[..., :1, :]
    if isinstance(points, Tensor):
        first = points[0]
        units = torch.eye(points.shape[1], device=points.device).long()
        neighbours = [_index_of(points, first + unit) for unit in units]
        offsets = positions - first
    else:
        neighbours, offsets = [points[1] if points[0] > 1 else None, 1 if points[1] > 1 else None], positions
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
    found = (points == point).all(dim=1).nonzero()
    return int(found[0]) if len(found) else None
