"""Anchors as MMDetection has them: not rounded, and centred on the grid points (0, 0), (stride, 0), ..."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def level_anchors(
    stride: int, grid: tuple[int, int], scale: float, ratios: Sequence[float], device: torch.device
) -> Tensor:
    """(height * width * ratios, 4): row by row, and all ratios of a place together.

    Each has the area of a square of side scale * stride, and height / width as in `ratios`.
    """
    ratio = torch.tensor(ratios, device=device, dtype=torch.float32)
    height, width = stride * scale * ratio.sqrt(), stride * scale / ratio.sqrt()
    around_zero = torch.stack([-width, -height, width, height], dim=-1) / 2
    y, x = (torch.arange(n, device=device, dtype=torch.float32) * stride for n in grid)
    y, x = torch.meshgrid(y, x, indexing="ij")
    places = torch.stack([x, y, x, y], dim=-1)
    return (places[:, :, None] + around_zero).flatten(0, 2)


def usable(stride: int, grid: tuple[int, int], ratios: int, padded: tuple[int, int], device: torch.device) -> Tensor:
    """(height * width * ratios,) bool: whether an anchor's place lies in the image as padded on its own.

    The rest of the grid is there because of larger images in the batch; training leaves it out.
    """
    rows, columns = (torch.arange(n, device=device) * stride < side for n, side in zip(grid, padded, strict=True))
    return (rows[:, None] & columns).flatten().repeat_interleave(ratios)
