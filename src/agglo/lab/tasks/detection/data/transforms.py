"""Transforms of images with their objects: (PIL RGB image, target) -> (normalised tensor (3, H, W), target).

MMDetection's pipeline has another rounding of sizes and other crops than torchvision's transforms. All draws come from
torch's global generator, which the training loop seeds for each position of each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from agglo.lab.tasks.detection.data.base import Target, Transform

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of RGB bytes

# The released pipeline: two ways of scaling, with equal chance, then a crop.
SHORT_SIDES = tuple(range(480, 801, 32))
SHORT_SIDES_BEFORE_CROP = (400, 500, 600)
FIRST_CROP, LAST_CROP = (384, 600), (1024, 1024)  # sides from, to
LONGEST = 1333
TEST_SHORT_SIDE = 800


def transforms_for(image_size: int | None = None, *, flip: float = 0.5) -> tuple[Transform, Transform]:
    """Return the transforms for training, which mirror with probability `flip`, and for evaluation.

    image_size: None is the paper's pipeline, for COCO: in training flip; with equal chance resize, or resize, crop and
    resize; then crop to at most 1024 x 1024, which may show no object at all. In evaluation the short side becomes 800
    pixels, unless the long side would be above 1333. For small data, every image becomes a square of that side.
    """
    mirror = v2.RandomHorizontalFlip(flip)
    if image_size is None:
        sides = (SHORT_SIDES_BEFORE_CROP, SHORT_SIDES, [TEST_SHORT_SIDE])
        smaller, resize, test = (ResizeShortSide(each, antialias=False) for each in sides)  # as MMDetection
        first = v2.RandomApply([smaller, RandomCrop(*FIRST_CROP)])
        return _finished(mirror, first, resize, RandomCrop(*LAST_CROP)), _finished(test)
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    # Small data is often made smaller still: without antialiasing thin things would break up.
    square = v2.Resize((image_size, image_size), antialias=True)
    return _finished(mirror, square), _finished(square)


def _finished(*transforms: v2.Transform) -> Transform:
    end = [v2.ToDtype(torch.float32), v2.Normalize(MEAN, STD), v2.ClampBoundingBoxes("hard"), v2.ToPureTensor()]
    composed: Transform = v2.Compose([v2.ToImage(), *transforms, *end, without_empty])
    return composed


def without_empty(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Remove objects whose box has no area or whose mask has no pixel."""
    if "boxes" in target:
        boxes, masks = target["boxes"], target["masks"]
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1) & masks.flatten(1).bool().any(1)
        target = {**target, **{name: target[name][kept] for name in ("boxes", "labels", "masks")}}
    return image, target


def size_for(size: Sequence[int], short: int) -> list[int]:
    """Return (height, width) scaled until a side meets its limit, rounded as in mmcv, and at least 1.

    >>> size_for((480, 640), 800), size_for((100, 400), 800)
    ([800, 1067], [333, 1333])
    """
    scale = min(LONGEST / max(size), short / min(size))
    return [max(1, int(side * scale + 0.5)) for side in size]


class ResizeShortSide(v2.RandomShortestSize):
    """Scale to one of several short sides, with mmcv's rounding."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        short = self.min_size[int(torch.randint(len(self.min_size), ()))]
        return {"size": size_for(functional.get_size(flat_inputs[0]), short)}


class RandomCrop(v2.Transform):
    """Crop to sides drawn between two sizes, or the image's own where that is smaller.

    Boxes are cut at the window, as in MMDetection, not drawn anew around what is left of a mask.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__()
        self.smallest, self.largest = smallest, largest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = functional.get_size(flat_inputs[0])
        rows, columns = (
            int(torch.randint(min(side, self.smallest), min(side, self.largest) + 1, ())) for side in (height, width)
        )
        top, left = (int(torch.randint(room + 1, ())) for room in (height - rows, width - columns))
        return {"top": top, "left": left, "height": rows, "width": columns}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return functional.crop(inpt, **params)
