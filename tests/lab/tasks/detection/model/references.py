"""Slow definitions in plain Python, to hold the heads against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Box = Sequence[float]


def iou(a: Box, b: Box) -> float:
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union


def difference(box: Box, reference: Box, deviations: Sequence[float] = (1, 1, 1, 1)) -> list[float]:
    width, height = reference[2] - reference[0], reference[3] - reference[1]
    x, y = (box[0] + box[2] - reference[0] - reference[2]) / 2, (box[1] + box[3] - reference[1] - reference[3]) / 2
    exact = (x / width, y / height, math.log((box[2] - box[0]) / width), math.log((box[3] - box[1]) / height))
    return [value / deviation for value, deviation in zip(exact, deviations, strict=True)]


def moved(reference: Box, change: Sequence[float], size: tuple[int, int]) -> list[float]:
    """The box that a predicted difference means, cut at the border of an image (height, width)."""
    width, height = reference[2] - reference[0], reference[3] - reference[1]
    x = (reference[0] + reference[2]) / 2 + change[0] * width
    y = (reference[1] + reference[3]) / 2 + change[1] * height
    limit = abs(math.log(16 / 1000))
    width *= math.exp(min(max(change[2], -limit), limit))
    height *= math.exp(min(max(change[3], -limit), limit))
    ends = ((x - width / 2, size[1]), (y - height / 2, size[0]), (x + width / 2, size[1]), (y + height / 2, size[0]))
    return [min(max(value, 0), end) for value, end in ends]


def suppress(boxes: Sequence[Box], scores: Sequence[float], groups: Sequence[int], threshold: float) -> list[int]:
    """Indices that stay, best first: none overlaps a better one of its group by more than the threshold."""
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(groups[i] != groups[j] or iou(boxes[i], boxes[j]) <= threshold for j in kept):
            kept.append(i)
    return kept


def roi_align(features: Tensor, box: Box, side: int, stride: float) -> Tensor:
    """(C, side, side) of a map (C, H, W): each cell is the mean of samples, as many as it has pixels, rounded up."""
    x1, y1, x2, y2 = (value / stride - 0.5 for value in box)
    high, wide = (y2 - y1) / side, (x2 - x1) / side
    rows, columns = math.ceil(high), math.ceil(wide)
    out = torch.zeros(features.shape[0], side, side)
    for i in range(side):
        for j in range(side):
            for row in range(rows):
                for column in range(columns):
                    y = y1 + high * (i + (row + 0.5) / rows)
                    x = x1 + wide * (j + (column + 0.5) / columns)
                    out[:, i, j] += _bilinear(features, y, x) / (rows * columns)
    return out


def _bilinear(features: Tensor, y: float, x: float) -> Tensor:
    height, width = features.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(features.shape[0])
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = features[:, top, left] * (left + 1 - x) + features[:, top, right] * (x - left)
    lower = features[:, bottom, left] * (left + 1 - x) + features[:, bottom, right] * (x - left)
    return upper * (top + 1 - y) + lower * (y - top)


def rectangles(boxes: Sequence[Sequence[int]], labels: Sequence[int], size: tuple[int, int]) -> dict[str, Tensor]:
    """A target whose objects fill their boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[y1:y2, x1:x2] = 1
    box = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": box, "labels": torch.tensor(labels, dtype=torch.int64), "masks": masks}
