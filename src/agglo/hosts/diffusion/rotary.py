"""Rotary position embeddings of merged image tokens: a group takes the mean position of its members.

Flux computes its tables from position ids, so the mean ids go through the model's own embedding. Video transformers
hand attention finished tables of cosines and sines at the points of a grid. Angles are linear in the position, so the
step of every channel along each axis is read off the table, and a mean position between grid points gets its own
angle. A step is known up to whole turns only: the smallest is taken, the smoothest rotation through the grid points.
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
    origin = angles[:1]
    index = torch.arange(math.prod(axes), device=angles.device)
    means = grouping.merge(_points(index, axes).expand(grouping.labels.shape[0], -1, -1).contiguous())
    angle = origin.unsqueeze(0)
    for axis, length in enumerate(axes):
        if length > 1:
            neighbour = math.prod(axes[axis + 1 :])
            turn = angles[neighbour : neighbour + 1] - origin
            step = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            angle = angle + means[..., axis : axis + 1] * step
    angle = angle.expand(*means.shape[:2], -1)
    return angle.cos().to(table[0].dtype), angle.sin().to(table[1].dtype)


def _points(index: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Coordinates (N, A) of the grid points, the last axis fastest."""
    coordinates = []
    for length in reversed(axes):
        coordinates.append(index % length)
        index = index // length
    return torch.stack(coordinates[::-1], dim=-1).float()
