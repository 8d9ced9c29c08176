"""Boxes (x1, y1, x2, y2) and the differences that the heads predict of them.

A difference (dx, dy, dw, dh) moves the centre of a reference box by (dx, dy) times its width and height, and scales
its width and height by (exp dw, exp dh); all four are divided by `deviations` in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

# No predicted box is more than 62.5 times larger or smaller than its reference: exp stays finite.
LARGEST_LOG_SCALE = math.log(1000 / 16)
NO_DEVIATIONS = (1.0, 1.0, 1.0, 1.0)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """No autocast in here: half precision moves boxes by pixels and makes losses overflow."""
    return torch.autocast(device.type, enabled=False)


def encode(boxes: Tensor, references: Tensor, deviations: Sequence[float] = NO_DEVIATIONS) -> Tensor:
    """What must be predicted for reference boxes (..., 4) to become `boxes` (..., 4): (..., 4)."""
    centre, size = _centre_and_size(boxes)
    reference_centre, reference_size = _centre_and_size(references)
    differences = torch.cat([(centre - reference_centre) / reference_size, (size / reference_size).log()], dim=-1)
    return differences / differences.new_tensor(deviations)


def decode(
    differences: Tensor,
    references: Tensor,
    deviations: Sequence[float] = NO_DEVIATIONS,
    inside: tuple[int, int] | None = None,
) -> Tensor:
    """The boxes (..., 4) that predicted differences (..., 4) of references (..., 4) mean.

    inside: (height, width) of the image, at whose border the boxes end.
    """
    differences = differences * differences.new_tensor(deviations)
    reference_centre, reference_size = _centre_and_size(references)
    centre = reference_centre + differences[..., :2] * reference_size
    size = reference_size * differences[..., 2:].clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE).exp()
    boxes = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
    return boxes if inside is None else clip(boxes, inside)


def clip(boxes: Tensor, inside: tuple[int, int]) -> Tensor:
    """Boxes (..., 4) cut at the border of an image (height, width)."""
    height, width = inside
    return torch.stack([boxes[..., i].clamp(0, end) for i, end in enumerate((width, height, width, height))], dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
