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
from typing import NamedTuple

import torch
from torch import Tensor

from agglo.grouping import Grouping

Table = tuple[Tensor, Tensor]


class Ids(NamedTuple):
    """Position ids of the text (T, A) and the image (N, A), and the model's embedding (S, A) -> two tables (S, D)."""

    text: Tensor
    image: Tensor
    embed: Callable[[Tensor], Table]

    def tables(self, grouping: Grouping) -> list[Table]:
        """Return cosines and sines (T + G, D) for each image of the batch, text first."""
        means = grouping.merge(self.image.float().expand(grouping.labels.shape[0], -1, -1).contiguous())
        return [self.embed(torch.cat([self.text.float(), mean])) for mean in means.unbind()]


def merged_table(table: Table, axes: tuple[int, ...], grouping: Grouping) -> Table:
    """Return cosines and sines (B, G, D) of the groups, from those (N, D) of the grid points, last axis fastest."""
    cosine, sine = (part.float() for part in table)
    angles = torch.atan2(sine, cosine)
    index = torch.arange(math.prod(axes), device=angles.device)
    strides = [math.prod(axes[axis + 1 :]) for axis in range(len(axes))]
    points = torch.stack([index // stride % length for stride, length in zip(strides, axes, strict=True)], -1).float()
    means = grouping.merge(points.expand(grouping.labels.shape[0], -1, -1).contiguous())
    # From the nearest grid point on, whose angle is known, so that errors of a step do not add up along an axis.
    nearest = means.round()
    angle = angles[(nearest.long() * torch.tensor(strides, device=angles.device)).sum(dim=-1)]
    for axis, (stride, length) in enumerate(zip(strides, axes, strict=True)):
        if length > 1:
            turn = angles[stride] - angles[0]
            step = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            angle = angle + (means - nearest)[..., axis : axis + 1] * step
    return angle.cos().to(table[0].dtype), angle.sin().to(table[1].dtype)
