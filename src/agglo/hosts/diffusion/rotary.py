"""Rotary position embeddings of merged image tokens: a group takes the mean position of its members.

Flux computes its tables from position ids, so the mean ids go through the model's own embedding. Video transformers
hand attention finished tables of cosines and sines at the points of a grid. Angles are linear in the position, so the
step of every channel along each axis is read off the table, and a mean position between grid points gets its own
angle, counted from the nearest of them. A step is known up to whole turns only: the smallest is taken, the smoothest
rotation through the grid points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agglo.grouping import Grouping

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Ids:
    """Positions by ids: text (T, A), image (N, A), and the model's embedding (S, A) -> two tables (S, D)."""

    text: Tensor
    image: Tensor
    embed: Callable[[Tensor], Table]

    def tables(self, grouping: Grouping) -> list[Table]:
        """For each picture of the batch: cosines and sines (T + G, D), text first."""
        means = grouping.merge(self.image.float().expand(grouping.labels.shape[0], -1, -1).contiguous())
        return [self.embed(torch.cat([self.text.float(), mean])) for mean in means.unbind()]


def merged_table(table: Table, axes: tuple[int, ...], grouping: Grouping) -> Table:
    """Cosines and sines (B, G, D) of the groups, from those (N, D) of the grid points."""
    cosine, sine = (part.float() for part in table)
    angles = torch.atan2(sine, cosine)
    points = _points(torch.arange(math.prod(axes), device=angles.device), axes)
    means = grouping.merge(points.expand(grouping.labels.shape[0], -1, -1).contiguous())
    # From the nearest grid point on, whose angle is known, so that errors of a step do not add up along an axis.
    nearest = means.round()
    angle = angles[_index(nearest, axes)]
    for axis, length in enumerate(axes):
        if length > 1:
            neighbour = math.prod(axes[axis + 1 :])
            turn = angles[neighbour] - angles[0]
            step = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            angle = angle + (means - nearest)[..., axis : axis + 1] * step
    return angle.cos().to(table[0].dtype), angle.sin().to(table[1].dtype)


def _index(points: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Of grid points (..., A), the last axis fastest."""
    index = torch.zeros_like(points[..., 0], dtype=torch.int64)
    for axis, length in enumerate(axes):
        index = index * length + points[..., axis].long()
    return index


def _points(index: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Coordinates (N, A) of the grid points, the last axis fastest."""
    coordinates = []
    for length in reversed(axes):
        coordinates.append(index % length)
        index = index // length
    return torch.stack(coordinates[::-1], dim=-1).float()
