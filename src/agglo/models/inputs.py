"""The input size and normalisation that a model expects, and the transform that prepares images for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Inputs:
    """How images are prepared for a model.

    Attributes:
        image_size: (height, width).
        mean: One number per channel; one channel makes images grey, three make them RGB.
        crop: Fraction of the resized image's side that is left; 0.875 is a resize to 256 and a crop of 224.
        squash: Resize both sides, whatever the image's proportions; otherwise the short one.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: float = 0.875
    squash: bool = False

    def __str__(self) -> str:
        resized = "x".join(str(math.floor(side / self.crop)) for side in self.image_size)
        how = "aspect ignored" if self.squash else "by the short side"
        return f"resized to {resized} ({self.interpolation}, {how}), centre crop {'x'.join(map(str, self.image_size))}"

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop_pct={self.crop!r} must lie in (0, 1]")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"mean={self.mean} and std={self.std} must both have 1 value (grey) or 3 (RGB)")

    def normalise(self, pixels: Tensor) -> Tensor:
        """Turn bytes (B, C, H, W) on any device into what `evaluation_transform` gives with normalise=True."""
        mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


def crop_of(side: int, resized: int) -> float:
    """Return `Inputs.crop` for an image that is resized to so many pixels and cropped to `side` of them.

    It is the quotient, or the next smaller number where rounding would lose a pixel.

    >>> import math
    >>> crop_of(224, 256), math.floor(32 / (32 / 93)), math.floor(32 / crop_of(32, 93))
    (0.875, 92, 93)
    """
    if resized < side:
        raise ValueError(f"a crop of {side} pixels does not fit into an image resized to {resized}")
    fraction = side / resized
    return fraction if math.floor(side / fraction) == resized else math.nextafter(fraction, 0)


def evaluation_transform(inputs: Inputs, *, normalise: bool = True) -> Transform:
    """Return resize, centre crop and normalisation; normalise=False leaves pixels as bytes, for `Inputs.normalise`."""
    from timm.data import create_transform
    from torchvision.transforms import Compose

    prepare = create_transform(
        inputs.image_size,
        interpolation=inputs.interpolation,
        mean=inputs.mean,
        std=inputs.std,
        crop_pct=inputs.crop,
        crop_mode="squash" if inputs.squash else "center",
        normalize=normalise,
    )
    return Compose([convert(inputs), prepare])


def convert(inputs: Inputs) -> Callable[[Any], Any]:
    """Return the conversion of PIL images to grey or RGB, as the model expects."""
    return methodcaller("convert", "L" if len(inputs.mean) == 1 else "RGB")
