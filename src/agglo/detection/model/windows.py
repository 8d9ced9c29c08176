"""Attention within windows of the grid, as the original ViT-Adapter has in three of four blocks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from agglo.hosts.vit.timm import PARTS

Grid = tuple[int, int]


def windowed_block(block: Any, x: Tensor, rotary: Tensor | None, grid: Grid, window: int) -> Tensor:
    """A block of the ViT on tokens x (B, N, C) of a grid, each attending to those of its own window.

    Where windows stand out over the grid, queries, keys and values are zero there, and nothing hides them: a token in
    such a window gives every missing place the weight exp(0), as in the released code.
    """
    projected = PARTS.project(block, x, rotary)
    q, k, v = (_to_windows(tensor, grid, window) for tensor in (projected.q, projected.k, projected.v))
    attended = F.scaled_dot_product_attention(q, k, v, dropout_p=projected.dropout, scale=projected.scale)
    x = PARTS.join(block, x, _from_windows(attended, grid, window, len(x)), projected)
    return PARTS.feed(block, x)


def _to_windows(x: Tensor, grid: Grid, window: int) -> Tensor:
    """(B, H, N, d) -> (B * windows, H, window * window, d)."""
    batch, heads, _, width = x.shape
    rows, columns = grid
    x = F.pad(x.view(batch, heads, rows, columns, width), (0, 0, 0, -columns % window, 0, -rows % window))
    x = x.unflatten(3, (-1, window)).unflatten(2, (-1, window))  # (B, H, down, window, across, window, d)
    return x.permute(0, 2, 4, 1, 3, 5, 6).reshape(-1, heads, window * window, width)


def _from_windows(x: Tensor, grid: Grid, window: int, batch: int) -> Tensor:
    """The inverse, what stands out cut off."""
    heads, _, width = x.shape[1:]
    rows, columns = grid
    down, across = -(-rows // window), -(-columns // window)
    x = x.view(batch, down, across, heads, window, window, width).permute(0, 3, 1, 4, 2, 5, 6)
    x = x.reshape(batch, heads, down * window, across * window, width)[:, :, :rows, :columns]
    return x.reshape(batch, heads, rows * columns, width)
