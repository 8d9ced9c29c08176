"""How ViT-Adapter lets a plain ViT and a pyramid of maps tell each other what they see.

An `Injector` tells the tokens what is in the pyramid, before some blocks of the ViT; an `Extractor` tells the pyramid
what those blocks made of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from agglo.detection.model.deformable_attention import DeformableAttention, Shape, cell_centres

EPS = 1e-6  # of layer norms, as in the ViT's blocks
PYRAMID = 3  # maps that tokens and pyramid exchange: at half, one and two times the ViT's stride


class Injector(nn.Module):
    """What the tokens gain from the pyramid: gamma * attention(LN(tokens), LN(pyramid)). gamma (C,) starts at 0."""

    def __init__(self, width: int, *, heads: int, points: int) -> None:
        super().__init__()
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=PYRAMID, points=points)
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor, grid: Shape, pyramid: Tensor, shapes: Sequence[Shape]) -> Tensor:
        """tokens: (B, N, C) on a grid. pyramid: (B, S, C), maps of these shapes. Returns the gain (B, N, C)."""
        places = cell_centres([grid], tokens.device)
        found = self.attention(self.norm_tokens(tokens), places, self.norm_pyramid(pyramid), shapes)
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
        """(B, S, C) -> (B, S, C), maps of these shapes."""
        x = self.enter(pyramid)
        maps = []
        for one_map, shape in zip(x.split([h * w for h, w in shapes], dim=1), shapes, strict=True):
            maps.append(self.convolution(one_map.transpose(1, 2).unflatten(2, shape)).flatten(2).transpose(1, 2))
        left: Tensor = self.leave(self.activation(torch.cat(maps, dim=1)))
        return left


class Extractor(nn.Module):
    """The pyramid after looking at the tokens: + attention(LN(pyramid), LN(tokens)), then + ConvFFN(LN(pyramid))."""

    def __init__(self, width: int, *, heads: int, points: int, ffn_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.norm_pyramid = nn.LayerNorm(width, eps=EPS)
        self.norm_tokens = nn.LayerNorm(width, eps=EPS)
        self.attention = DeformableAttention(width, heads=heads, levels=1, points=points)
        self.norm_ffn = nn.LayerNorm(width, eps=EPS)
        self.ffn = ConvFFN(width, int(width * ffn_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, pyramid: Tensor, shapes: Sequence[Shape], tokens: Tensor, grid: Shape) -> Tensor:
        """pyramid: (B, S, C), maps of these shapes. tokens: (B, N, C) on a grid. Returns the pyramid (B, S, C)."""
        places = cell_centres(shapes, pyramid.device)
        found = self.attention(self.norm_pyramid(pyramid), places, self.norm_tokens(tokens), [grid])
        pyramid = pyramid + found
        changed: Tensor = pyramid + self.drop_path(self.ffn(self.norm_ffn(pyramid), shapes))
        return changed


class Interaction(nn.Module):
    """An injector before some blocks of the ViT, and one or several extractors after them."""

    def __init__(
        self, width: int, *, heads: int, points: int, ffn_ratio: float, drop_path: float, extractors: int = 1
    ) -> None:
        super().__init__()
        self.injector = Injector(width, heads=heads, points=points)
        self.extractors = nn.ModuleList(
            Extractor(width, heads=heads, points=points, ffn_ratio=ffn_ratio, drop_path=drop_path)
            for _ in range(extractors)
        )
