"""Pictures with their objects, as a detector takes them: (PIL image, target) -> (normalised tensor, target).

Everything random is drawn from torch's global generator, which the training loop seeds for each place of each epoch
(`experiments.training.batches`), so that a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agglo.detection.data.base import Target, Transform

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of RGB bytes

# The released pipeline: two ways of scaling, with equal chance, then a crop.
SHORT_SIDES = tuple(range(480, 801, 32))
SHORT_SIDES_BEFORE_CROP = (400, 500, 600)
FIRST_CROP, LAST_CROP = (384, 600), (1024, 1024)  # sides from, to
LONGEST = 1333
TEST_SHORT_SIDE = 800


def transforms_for(
    image_size: int | None = None, *, flip: float = 0.5, as_bytes: bool = False
) -> tuple[Transform, Transform]:
    """For training and for evaluation.

    image_size: None is the paper's pipeline, for COCO. A number is for small data: every picture becomes a square of
        that side, and is mirrored with probability `flip` in training.
    as_bytes: in evaluation, leave it to the caller to call `normalised`: bytes take a quarter of the memory.
    """
    if image_size is None:
        return PaperTraining(flip=flip), ShortSide(TEST_SHORT_SIDE, LONGEST, as_bytes)
    return Square(image_size, flip=flip), Square(image_size, as_bytes=as_bytes)


@dataclass(frozen=True)
class PaperTraining:
    """Flip; then, with equal chance, a resize to one of many scales, or a resize, a crop and such a resize; then a crop
    to at most 1024 x 1024. A crop may show no object at all."""

    flip: float = 0.5

    def __call__(self, image: Any, target: Target) -> tuple[Tensor, Target]:
        pixels: Any = as_tensor(image)
        pixels, target = flipped(pixels, target, self.flip)
        if chance(0.5):
            pixels, target = resized(pixels, target, one_of(SHORT_SIDES_BEFORE_CROP), LONGEST)
            pixels, target = randomly_cropped(pixels, target, *FIRST_CROP)
        pixels, target = resized(pixels, target, one_of(SHORT_SIDES), LONGEST)
        pixels, target = randomly_cropped(pixels, target, *LAST_CROP)
        return normalised(pixels), target


@dataclass(frozen=True)
class ShortSide:
    """The short side becomes `short`, unless the long one would be above `longest`."""

    short: int
    longest: int
    as_bytes: bool = False

    def __call__(self, image: Any, target: Target) -> tuple[Tensor, Target]:
        pixels, target = resized(as_tensor(image), target, self.short, self.longest)
        return pixels if self.as_bytes else normalised(pixels), target


@dataclass(frozen=True)
class Square:
    """Every picture as a square, whatever its proportions; mirrored with probability `flip`."""

    side: int
    flip: float = 0.0
    as_bytes: bool = False

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"image_size={self.side} must be at least 1")

    def __call__(self, image: Any, target: Target) -> tuple[Tensor, Target]:
        pixels: Any = as_tensor(image)
        if self.flip:
            pixels, target = flipped(pixels, target, self.flip)
        # Small data is often made smaller still: without antialiasing thin things would break up.
        pixels, target = resized_to(pixels, target, (self.side, self.side), antialias=True)
        return pixels if self.as_bytes else normalised(pixels), target


def as_tensor(image: Any) -> Tensor:
    """A PIL image as bytes (3, H, W)."""
    from torchvision.transforms.v2 import functional

    pixels: Tensor = functional.pil_to_tensor(image.convert("RGB"))
    return pixels


def normalised(pixels: Tensor) -> Tensor:
    """Bytes (..., 3, H, W) as a detector takes them."""
    mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (MEAN, STD))
    return (pixels.float() - mean) / std


def denormalised(pixels: Tensor) -> Tensor:
    """The bytes that `normalised` came from."""
    mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (MEAN, STD))
    return (pixels * std + mean).round().clamp(0, 255).to(torch.uint8)


def chance(probability: float) -> bool:
    return bool(torch.rand(()) < probability)


def one_of(values: Sequence[int]) -> int:
    return values[int(torch.randint(len(values), ()))]


def flipped(pixels: Tensor, target: Target, probability: float) -> tuple[Tensor, Target]:
    """Left and right exchanged with that probability."""
    from torchvision.transforms.v2 import functional

    if not chance(probability):
        return pixels, target
    return functional.horizontal_flip(pixels), _moved(target, functional.horizontal_flip)


def size_for(size: tuple[int, int], short: int, longest: int) -> tuple[int, int]:
    """(height, width) scaled until a side meets its limit; rounded as in mmcv, and never to nothing.

    >>> size_for((480, 640), 800, 1333), size_for((100, 400), 800, 1333)
    ((800, 1067), (333, 1333))
    """
    scale = min(longest / max(size), short / min(size))
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def resized(pixels: Tensor, target: Target, short: int, longest: int) -> tuple[Tensor, Target]:
    """Scaled to a short side, without antialiasing, as MMDetection scales."""
    height, width = pixels.shape[-2:]
    return resized_to(pixels, target, size_for((height, width), short, longest), antialias=False)


def resized_to(pixels: Tensor, target: Target, size: tuple[int, int], *, antialias: bool) -> tuple[Tensor, Target]:
    """In another (height, width). An object that loses its last pixel is gone."""
    from torchvision.transforms.v2 import functional

    if tuple(pixels.shape[-2:]) == size:
        return pixels, target
    target = _inside(_moved(target, lambda value: functional.resize(value, list(size))))
    return functional.resize(pixels, list(size), antialias=antialias), without_vanished(target)


def randomly_cropped(pixels: Tensor, target: Target, smallest: int, largest: int) -> tuple[Tensor, Target]:
    """A window whose sides are drawn between two sizes, or the picture's own where that is smaller."""
    height, width = pixels.shape[-2:]
    rows, columns = (int(torch.randint(min(side, smallest), min(side, largest) + 1, ())) for side in (height, width))
    top, left = int(torch.randint(height - rows + 1, ())), int(torch.randint(width - columns + 1, ()))
    return cropped(pixels, target, top, left, rows, columns)


def cropped(pixels: Tensor, target: Target, top: int, left: int, rows: int, columns: int) -> tuple[Tensor, Target]:
    """Boxes are cut at the window, as in MMDetection, not drawn anew around what is left of a mask. Objects of which no
    pixel is left are removed."""
    from torchvision.transforms.v2 import functional

    target = _inside(_moved(target, lambda value: functional.crop(value, top, left, rows, columns)))
    return functional.crop(pixels, top, left, rows, columns), without_vanished(target)


def without_vanished(target: Target) -> Target:
    """Without objects whose box has no area or whose mask has no pixel."""
    from torchvision import tv_tensors

    if "boxes" not in target:
        return target
    boxes, masks = target["boxes"], target["masks"]
    left = (boxes[:, 2:] > boxes[:, :2]).all(1) & masks.flatten(1).any(1).bool()
    if left.all():
        return target
    return {
        **target,
        "boxes": tv_tensors.wrap(boxes[left], like=boxes),
        "labels": target["labels"][left],
        "masks": tv_tensors.wrap(masks[left], like=masks),
    }


def _moved(target: Target, move: Any) -> Target:
    """A target whose boxes and masks were moved."""
    return {key: move(value) if key in ("boxes", "masks") else value for key, value in target.items()}


def _inside(target: Target) -> Target:
    """Boxes cut at the picture's rim: crops leave them outside, rounding a millionth of a pixel."""
    from torchvision.transforms.v2 import functional

    if "boxes" not in target:
        return target
    return {**target, "boxes": functional.clamp_bounding_boxes(target["boxes"], clamping_mode="hard")}
