"""Multi-scale deformable attention (Zhu et al., Deformable DETR, ICLR 2021) in plain torch.

Every query looks at a few points of each map, at learned offsets from its own place, and mixes what it finds there by
learned weights:

    out(q) = W_out  sum over levels l and points p of  a_lp(q) (W_value x_l)(place(q) + offset_lp(q) / extent_l)

for every head apart, extent_l being the map's width and height. A softmax over all levels and points together makes the
weights a. Maps are read bilinearly, and are zero outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int]


class DeformableAttention(nn.Module):
    """Queries (B, Q, C) look at maps of C channels.

    levels: maps that it looks at. points: on each of them, for every head.
    """

    def __init__(self, width: int, *, heads: int, levels: int, points: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} do not divide the width {width}")
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every head starts in a direction of its own, point p at p + 1 steps from the query, all weighing the same."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack([angles.cos(), angles.sin()], dim=-1)
        directions = directions / directions.abs().amax(dim=-1, keepdim=True)
        steps = torch.arange(1, self.points + 1).view(1, 1, -1, 1)
        offsets = directions[:, None, None] * steps.expand(self.heads, self.levels, self.points, 1)
        with torch.no_grad():
            self.offsets.bias.copy_(offsets.flatten())
        for zeroed in (self.offsets.weight, self.weights.weight, self.weights.bias, self.value.bias, self.out.bias):
            nn.init.zeros_(zeroed)
        nn.init.xavier_uniform_(self.value.weight)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, queries: Tensor, places: Tensor, maps: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """What the queries (B, Q, C) find, (B, Q, C).

        places: (Q, 2), x and y of each query, from 0 to 1.
        maps: (B, S, C), all maps row by row, one after the other; shapes: (height, width) of each.

        In float32 under autocast: offsets are fractions of a pixel on maps of a thousand.
        """
        if len(shapes) != self.levels or sum(h * w for h, w in shapes) != maps.shape[1]:
            raise ValueError(
                f"shapes={list(shapes)} do not fit {maps.shape[1]} values; needed: {self.levels} maps that hold them"
            )
        dtype = self.value.weight.dtype
        with torch.autocast(queries.device.type, enabled=False):
            queries, maps = queries.to(dtype), maps.to(dtype)
            batch, n_queries, _ = queries.shape
            value = self.value(maps).float().unflatten(-1, (self.heads, -1))
            offsets = self.offsets(queries).float().view(batch, n_queries, self.heads, self.levels, self.points, 2)
            weights = self.weights(queries).float().view(batch, n_queries, self.heads, -1).softmax(dim=-1)
            extents = offsets.new_tensor([(w, h) for h, w in shapes])[:, None]
            found = sample(value, shapes, places.float().view(1, -1, 1, 1, 1, 2) + offsets / extents, weights)
            out: Tensor = self.out(found.to(dtype))
            return out


def sample(value: Tensor, shapes: Sequence[Shape], points: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of values (B, S, H, d) at points (B, Q, H, L, P, 2): (B, Q, H * d).

    weights: (B, Q, H, L * P). Points outside of 0 to 1 are outside of their map.
    """
    batch, _, heads, width = value.shape
    on_grid = (2 * points - 1).transpose(1, 2).flatten(0, 1)  # (B * H, Q, L, P, 2)
    found = []
    for level, one_map in enumerate(value.split([h * w for h, w in shapes], dim=1)):
        picture = one_map.flatten(2).transpose(1, 2).reshape(batch * heads, width, *shapes[level])
        found.append(F.grid_sample(picture, on_grid[:, :, level], padding_mode="zeros", align_corners=False))
    mixed = torch.stack(found, dim=-2).flatten(-2) * weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)
    return mixed.sum(-1).view(batch, heads * width, -1).transpose(1, 2).contiguous()


def cell_centres(shapes: Sequence[Shape], device: torch.device | None = None) -> Tensor:
    """x and y, from 0 to 1, of the cells of one or several grids, row by row: (sum of cells, 2), in float32.

    >>> cell_centres([(1, 2)])
    tensor([[0.2500, 0.5000],
            [0.7500, 0.5000]])
    """
    grids = []
    for height, width in shapes:
        y, x = ((torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n for n in (height, width))
        grids.append(torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).view(-1, 2))
    return torch.cat(grids)
