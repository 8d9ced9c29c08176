"""Masks of objects, between the image and the small square over a box that the mask head predicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align

from agglo.detection.model.boxes import clip


def targets_in_boxes(masks: Tensor, objects: Tensor, boxes: Tensor, side: int) -> Tensor:
    """What the mask head should predict: (n, side, side) float32 of 0 and 1.

    masks: (m, h, w) of the objects of one image. objects: (n,) which of them each box (n, 4) stands for. The mask is
    averaged over each cell of the box, and the cell belongs to the object from one half on.
    """
    boxes = clip(boxes, (masks.shape[-2], masks.shape[-1]))
    shares = boxes.new_zeros(len(boxes), side, side)
    # Object by object: float copies of all masks of a crowded image would take gigabytes.
    for number in objects.unique().tolist():
        of_it = objects == number
        mask = masks[number].to(boxes.dtype)[None, None]
        shares[of_it] = roi_align(mask, [boxes[of_it]], side, sampling_ratio=0, aligned=True)[:, 0]
    return (shares >= 0.5).float()


def paste(probabilities: Tensor, boxes: Tensor, size: tuple[int, int], threshold: float) -> Tensor:
    """Masks (n, H, W) bool of an image of `size`: the squares (n, s, s) stretched over the boxes (n, 4).

    Each pixel reads the square bilinearly at its centre, and belongs to the object from `threshold` on. Nothing is
    rounded to whole pixels before.
    """
    height, width = size
    pasted = torch.zeros(len(boxes), height, width, dtype=torch.bool, device=boxes.device)
    for mask, square, box in zip(pasted, probabilities, boxes, strict=True):
        x1, y1, x2, y2 = box.tolist()
        if not (x2 > x1 and y2 > y1):
            continue
        left, right = max(int(x1) - 1, 0), min(int(x2) + 2, width)
        top, bottom = max(int(y1) - 1, 0), min(int(y2) + 2, height)
        x = _inside(torch.arange(left, right, device=box.device), box[0], box[2])
        y = _inside(torch.arange(top, bottom, device=box.device), box[1], box[3])
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        values = F.grid_sample(square[None, None].float(), places[None], align_corners=False)[0, 0]
        mask[top:bottom, left:right] = values >= threshold
    return pasted


def _inside(pixels: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Where pixel centres lie between two ends of a box: -1 at the start, 1 at the end."""
    return (pixels + 0.5 - start) / (end - start) * 2 - 1
