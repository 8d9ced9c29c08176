"""The layers of ViT-Adapter: spatial prior, deformable attention, injector and extractor.

An `Injector` adds features of the pyramid to the tokens before some blocks of the ViT; an `Extractor` updates the
pyramid from the tokens after these blocks. Both use multi-scale deformable attention (Zhu et al., Deformable DETR, ICLR
2021): every query samples a few points of each map at learned offsets and mixes the samples by learned weights,

    out(q) = W_out  sum over levels l and points p of  a_lp(q) (W_value x_l)(position(q) + offset_lp(q) / extent_l)

for every head separately, extent_l being the map's width and height. The weights a are a softmax over all levels and
points together. Maps are sampled bilinearly, and are zero outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

Shape = tuple[int, int]

EPS = 1e-6  # of layer norms, as in the ViT's blocks
PYRAMID = 3  # maps that tokens and pyramid exchange: at half, one and two times the ViT's stride
_STEM_STRIDES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}  # of the first convolution and of the pooling, by the stem's stride


class SpatialPrior(nn.Module):
    """A small convolutional network from images (B, 3, H, W) to four maps of out_width channels.

    Their strides are s, 2s, 4s and 8s, where s is 4 for ViT-Adapter's patches of 16 pixels, and 1 or 2 for smaller
    ones. The stem has `width` channels, the maps 1, 2, 4 and 4 times as many before the last, 1 x 1, convolutions.
    """

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        first, pooling = _STEM_STRIDES[stride]
        self.stem = nn.Sequential(
            *_convolution(3, width, first),
            *_convolution(width, width, 1),
            *_convolution(width, width, 1),
            nn.MaxPool2d(3, pooling, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(*_convolution(before, after, 2)) for before, after in pairwise(widths)
        )
        self.projections = nn.ModuleList(nn.Conv2d(each, out_width, 1) for each in widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [cast(Tensor, self.stem(images))]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [projection(each) for projection, each in zip(self.projections, maps, strict=True)]


def _convolution(width_in: int, width_out: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]


class DeformableAttention(nn.Module):
    """Deformable attention of queries (B, Q, C) to `levels` maps of C channels, `points` on each for every head."""

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
        """Give every head another direction, with point p at p + 1 steps from the query, and equal weights."""
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

    def forward(self, queries: Tensor, positions: Tensor, maps: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Attend, in float32 under autocast: offsets are fractions of a pixel on maps of a thousand.

        Queries (B, Q, C) are at positions (Q, 2), x and y from 0 to 1; maps (B, S, C) of these shapes (height, width)
        follow each other, row by row.
        """
        dtype = self.value.weight.dtype
        with torch.autocast(queries.device.type, enabled=False):
            queries, maps = queries.to(dtype), maps.to(dtype)
            value = self.value(maps).float().unflatten(-1, (self.heads, -1))
            offsets = self.offsets(queries).float().unflatten(-1, (self.heads, self.levels, self.points, 2))
            weights = self.weights(queries).float().unflatten(-1, (self.heads, -1)).softmax(dim=-1)
            extents = offsets.new_tensor([(w, h) for h, w in shapes])[:, None]
            found = sample(value, shapes, positions.float().view(1, -1, 1, 1, 1, 2) + offsets / extents, weights)
            return cast(Tensor, self.out(found.to(dtype)))


def sample(value: Tensor, shapes: Sequence[Shape], points: Tensor, weights: Tensor) -> Tensor:
    """Return the sum (B, Q, H * d), by weights (B, Q, H, L * P), of values (B, S, H, d) at points (B, Q, H, L, P, 2).

    Points, x and y, outside of 0 to 1 are outside of their map.
    """
    batch, _, heads, width = value.shape
    on_grid = (2 * points - 1).transpose(1, 2).flatten(0, 1)  # (B * H, Q, L, P, 2)
    found = []
    for level, one_map in enumerate(value.split([h * w for h, w in shapes], dim=1)):
        level_map = one_map.flatten(2).transpose(1, 2).reshape(batch * heads, width, *shapes[level])
        found.append(F.grid_sample(level_map, on_grid[:, :, level], padding_mode="zeros", align_corners=False))
    mixed = torch.stack(found, dim=-2).flatten(-2) * weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)
    return mixed.sum(-1).view(batch, heads * width, -1).transpose(1, 2).contiguous()


def cell_centres(shapes: Sequence[Shape], device: torch.device | None = None) -> Tensor:
    """Return x and y, from 0 to 1, of the cells of one or several grids, row by row: (sum of cells, 2), in float32.

    >>> cell_centres([(1, 2)])
    tensor([[0.2500, 0.5000],
            [0.7500, 0.5000]])
    """
    grids = []
    for height, width in shapes:
        y, x = ((torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n for n in (height, width))
        grids.append(torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).view(-1, 2))
    return torch.cat(grids)


class Injector(nn.Module):
    """What the tokens gain from the pyramid: gamma * attention(LN(tokens), LN(pyramid)). gamma (C,) starts at 0."""

    def __init__(self, width: int, *, heads: int, points: int) -> None:
        super().__init__()
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=PYRAMID, points=points)
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor, grid: Shape, pyramid: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Return the gain (B, N, C) of tokens (B, N, C) on a grid from a pyramid (B, S, C) of maps of these shapes."""
        positions = cell_centres([grid], tokens.device)
        found = self.attention(self.norm_tokens(tokens), positions, self.norm_pyramid(pyramid), shapes)
        return (self.gamma * found).to(tokens.dtype)


class ConvFFN(nn.Module):
    """Two linear layers with a depthwise 3 x 3 convolution between them, the same for all maps of the pyramid."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.convolution = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.activation = nn.GELU()
        self.leave = nn.Linear(hidden, width)

    def forward(self, pyramid: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """Return (B, S, C) of a pyramid (B, S, C) of maps of these shapes."""
        maps = self.enter(pyramid).split([h * w for h, w in shapes], dim=1)
        maps = [
            self.convolution(each.transpose(1, 2).unflatten(2, shape)).flatten(2).transpose(1, 2)
            for each, shape in zip(maps, shapes, strict=True)
        ]
        return cast(Tensor, self.leave(self.activation(torch.cat(maps, dim=1))))


class Extractor(nn.Module):
    """The pyramid after looking at the tokens: + attention(LN(pyramid), LN(tokens)), then + ConvFFN(LN(pyramid))."""

    def __init__(self, width: int, *, heads: int, points: int, drop_path: float) -> None:
        super().__init__()
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=1, points=points)
        self.norm_ffn = nn.LayerNorm(width, eps=EPS)
        self.ffn = ConvFFN(width, width // 4)
        self.drop_path = DropPath(drop_path)

    def forward(self, pyramid: Tensor, shapes: Sequence[Shape], tokens: Tensor, grid: Shape) -> Tensor:
        """Return the pyramid (B, S, C), maps of these shapes, updated from tokens (B, N, C) on a grid."""
        positions = cell_centres(shapes, pyramid.device)
        pyramid = pyramid + self.attention(self.norm_pyramid(pyramid), positions, self.norm_tokens(tokens), [grid])
        return cast(Tensor, pyramid + self.drop_path(self.ffn(self.norm_ffn(pyramid), shapes)))


class Interaction(nn.Module):
    """An injector before some blocks of the ViT, and one or several extractors after them."""

    def __init__(self, width: int, *, extractors: int, heads: int, points: int, drop_path: float) -> None:
        super().__init__()
        self.injector = Injector(width, heads=heads, points=points)
        made = (Extractor(width, heads=heads, points=points, drop_path=drop_path) for _ in range(extractors))
        self.extractors = nn.ModuleList(made)
