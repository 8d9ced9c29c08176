"""Transforms of images with their objects: (PIL image, target) -> (normalised tensor (3, H, W), target).

torchvision's functions in MMDetection's pipeline, whose rounding of sizes torchvision's transforms do not have. All
draws come from torch's global generator, which the training loop seeds for each position of each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from agglo.lab.tasks.detection.data.base import Target, Transform

Pair = tuple[Tensor, Target]

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of RGB bytes

# The released pipeline: two ways of scaling, with equal chance, then a crop.
SHORT_SIDES = tuple(range(480, 801, 32))
SHORT_SIDES_BEFORE_CROP = (400, 500, 600)
FIRST_CROP, LAST_CROP = (384, 600), (1024, 1024)  # sides from, to
LONGEST = 1333
TEST_SHORT_SIDE = 800


def transforms_for(image_size: int | None = None, *, flip: float = 0.5) -> tuple[Transform, Transform]:
    """Return the transforms for training, which mirror with probability `flip`, and for evaluation.

    image_size: None is the paper's pipeline, for COCO. For small data, every image becomes a square of that side.
    """
    if image_size is None:
        return partial(paper_training, flip=flip), paper_evaluation
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    return partial(square, side=image_size, flip=flip), partial(square, side=image_size)


def paper_training(image: Any, target: Target, *, flip: float = 0.5) -> Pair:
    """Flip; with equal chance resize, or resize, crop and resize; then crop to at most 1024 x 1024.

    A crop may show no object at all.
    """
    pair = flipped(functional.pil_to_tensor(image.convert("RGB")), target, flip)
    if torch.rand(()) < 0.5:
        pair = resized_short_side(*pair, _one_of(SHORT_SIDES_BEFORE_CROP))
        pair = randomly_cropped(*pair, *FIRST_CROP)
    pair = resized_short_side(*pair, _one_of(SHORT_SIDES))
    pixels, target = randomly_cropped(*pair, *LAST_CROP)
    return normalised(pixels), target


def paper_evaluation(image: Any, target: Target) -> Pair:
    """Resize the short side to 800 pixels, unless the long side would be above 1333."""
    pixels = functional.pil_to_tensor(image.convert("RGB"))
    pixels, target = resized_short_side(pixels, target, TEST_SHORT_SIDE)
    return normalised(pixels), target


def square(image: Any, target: Target, *, side: int, flip: float = 0.0) -> Pair:
    """Resize to a square, whatever the image's proportions; mirrored with probability `flip`."""
    pixels = functional.pil_to_tensor(image.convert("RGB"))
    if flip:
        pixels, target = flipped(pixels, target, flip)
    # Small data is often made smaller still: without antialiasing thin things would break up.
    pixels, target = resized(pixels, target, (side, side), antialias=True)
    return normalised(pixels), target


def normalised(pixels: Tensor) -> Tensor:
    """Return bytes (..., 3, H, W) as a detector takes them."""
    mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (MEAN, STD))
    return (pixels.float() - mean) / std


def _one_of(values: Sequence[int]) -> int:
    return values[int(torch.randint(len(values), ()))]


def flipped(pixels: Tensor, target: Target, probability: float) -> Pair:
    """Exchange left and right with that probability."""
    return _moved(pixels, target, functional.horizontal_flip) if torch.rand(()) < probability else (pixels, target)


def size_for(size: Sequence[int], short: int, longest: int = LONGEST) -> tuple[int, int]:
    """Return (height, width) scaled until a side meets its limit, rounded as in mmcv, and at least 1.

    >>> size_for((480, 640), 800), size_for((100, 400), 800)
    ((800, 1067), (333, 1333))
    """
    scale = min(longest / max(size), short / min(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def resized_short_side(pixels: Tensor, target: Target, short: int) -> Pair:
    """Scale to a short side, without antialiasing, as MMDetection does."""
    return resized(pixels, target, size_for(pixels.shape[-2:], short), antialias=False)


def resized(pixels: Tensor, target: Target, size: tuple[int, int], *, antialias: bool) -> Pair:
    """Scale to (height, width)."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels, target
    return _moved(pixels, target, partial(functional.resize, size=list(size), antialias=antialias))


def randomly_cropped(pixels: Tensor, target: Target, smallest: int, largest: int) -> Pair:
    """Crop to sides drawn between two sizes, or the image's own where that is smaller."""
    height, width = pixels.shape[-2:]
    rows, columns = (int(torch.randint(min(side, smallest), min(side, largest) + 1, ())) for side in (height, width))
    top, left = int(torch.randint(height - rows + 1, ())), int(torch.randint(width - columns + 1, ()))
    return cropped(pixels, target, top, left, rows, columns)


def cropped(pixels: Tensor, target: Target, top: int, left: int, rows: int, columns: int) -> Pair:
    """Crop; boxes are cut at the window, as in MMDetection, not drawn anew around what is left of a mask."""
    return _moved(pixels, target, lambda value: functional.crop(value, top, left, rows, columns))


def _moved(pixels: Tensor, target: Target, move: Callable[[Any], Any]) -> Pair:
    """Move an image with its boxes and masks, and remove objects without area or without a pixel."""
    pixels = move(pixels)
    if "boxes" not in target:
        return pixels, target
    boxes, masks = functional.clamp_bounding_boxes(move(target["boxes"]), clamping_mode="hard"), move(target["masks"])
    left = (boxes[:, 2:] > boxes[:, :2]).all(1) & masks.flatten(1).any(1).bool()
    kept = {name: tv_tensors.wrap(v[left], like=v) for name, v in (("boxes", boxes), ("masks", masks))}
    return pixels, {**target, **kept, "labels": target["labels"][left]}
