"""Boxes (x1, y1, x2, y2) as MMDetection defines them: anchors, deltas, and the candidates that a loss sees.

A delta (dx, dy, dw, dh) moves the centre of a reference box by (dx, dy) times its width and height, and scales its
width and height by (exp dw, exp dh); all four are divided by `deviations` in training.

torchvision's Matcher and sampler differ from `match` and `sample`: there each object gets its best candidate however
bad, and the sample depends on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_convert, box_iou, clip_boxes_to_image

from agglo.lab.tasks.detection.model.settings import Assignment

# No predicted box is more than 62.5 times larger or smaller than its reference: exp stays finite.
LARGEST_LOG_SCALE = math.log(1000 / 16)
NO_DEVIATIONS = (1.0, 1.0, 1.0, 1.0)
BACKGROUND, NEITHER = -1, -2


def full_precision(device: torch.device) -> torch.autocast:
    """Switch autocast off: half precision moves boxes by pixels and makes losses overflow."""
    return torch.autocast(device.type, enabled=False)


def encode(boxes: Tensor, references: Tensor, deviations: Sequence[float] = NO_DEVIATIONS) -> Tensor:
    """Return the deltas (..., 4) that turn reference boxes (..., 4) into `boxes` (..., 4)."""
    box, reference = (box_convert(some, "xyxy", "cxcywh") for some in (boxes, references))
    centre, size = (box[..., :2] - reference[..., :2]) / reference[..., 2:], box[..., 2:] / reference[..., 2:]
    return torch.cat([centre, size.log()], dim=-1) / boxes.new_tensor(deviations)


def decode(
    deltas: Tensor, references: Tensor, inside: tuple[int, int], deviations: Sequence[float] = NO_DEVIATIONS
) -> Tensor:
    """Return the boxes (..., 4) that predicted deltas make of reference boxes, cut at an image's (height, width)."""
    deltas = deltas * deltas.new_tensor(deviations)
    reference = box_convert(references, "xyxy", "cxcywh")
    centre = reference[..., :2] + deltas[..., :2] * reference[..., 2:]
    size = reference[..., 2:] * deltas[..., 2:].clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE).exp()
    return clip_boxes_to_image(box_convert(torch.cat([centre, size], dim=-1), "cxcywh", "xyxy"), inside)


def level_anchors(
    stride: int, grid: Sequence[int], scale: float, ratios: Sequence[float], device: torch.device
) -> Tensor:
    """Return the anchors (height * width * ratios, 4) of a level, row by row, all ratios of a position together.

    Each has the area of a square of side scale * stride, and height / width as in `ratios`. Other than torchvision's,
    they are not rounded.
    """
    ratio = torch.tensor(ratios, device=device, dtype=torch.float32)
    height, width = stride * scale * ratio.sqrt(), stride * scale / ratio.sqrt()
    around_zero = torch.stack([-width, -height, width, height], dim=-1) / 2
    y, x = (torch.arange(n, device=device, dtype=torch.float32) * stride for n in grid)
    y, x = torch.meshgrid(y, x, indexing="ij")
    return (torch.stack([x, y, x, y], dim=-1)[:, :, None] + around_zero).flatten(0, 2)


def anchors_inside(anchors: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which anchors (n,) bool are centred inside an image of size (height, width)."""
    x, y = box_convert(anchors, "xyxy", "cxcywh")[:, :2].round().unbind(1)  # centres lie on whole pixels
    return (x < size[1]) & (y < size[0])


class Sample(NamedTuple):
    """Indices of the candidates of one image that a loss sees, and the object of each positive one."""

    positive: Tensor
    negative: Tensor
    objects: Tensor


def match(candidates: Tensor, objects: Tensor, rules: Assignment) -> Tensor:
    """Return the object (n,) among (m, 4) that each candidate box (n, 4) stands for, or BACKGROUND, or NEITHER.

    The best candidates of an object, all that tie included, come last and overwrite: a later object wins.
    """
    if not len(objects) or not len(candidates):
        return torch.full((len(candidates),), BACKGROUND, device=candidates.device)
    iou = box_iou(objects, candidates)
    best, nearest = iou.max(dim=0)
    matched = torch.where(best >= rules.positive, nearest, torch.where(best < rules.negative, BACKGROUND, NEITHER))
    of_object = iou.amax(dim=1, keepdim=True)
    claims = (iou == of_object) & (of_object >= rules.minimum)
    numbers = torch.arange(len(objects), device=iou.device)[:, None]
    claimed_by = torch.where(claims, numbers, BACKGROUND).amax(dim=0)
    return torch.where(claimed_by >= 0, claimed_by, matched)


def sample(matched: Tensor, rules: Assignment) -> Sample:
    """Draw from matched candidates (n,) positives up to their share, and negatives for the rest."""
    positive = _draw((matched >= 0).nonzero()[:, 0], int(rules.samples * rules.positive_share))
    negative = _draw((matched == BACKGROUND).nonzero()[:, 0], rules.samples - len(positive))
    return Sample(positive, negative, matched[positive])


def _draw(indices: Tensor, at_most: int) -> Tensor:
    if len(indices) <= at_most:
        return indices
    # Drawn by the CPU's generator whatever the device: a run gives the same sample everywhere.
    return indices[torch.randperm(len(indices))[:at_most].sort().values.to(indices.device)]
