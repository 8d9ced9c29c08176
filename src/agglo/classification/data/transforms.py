"""PIL image -> normalised tensor, as the study prepares each data set; timm's transforms, and the study's Cutout."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from agglo.classification.data.augmentation import Augmentation
from agglo.classification.data.registry import dataset_named

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a model wants to see.

    image_size: (height, width).
    mean, std: one number per channel; one channel makes pictures grey, three make them RGB.
    crop: fraction of the resized picture's side that is left; 0.875 is a resize to 256 and a crop of 224.
    squash: resize to the image size itself, whatever the picture's proportions, and crop nothing.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: float = 0.875
    squash: bool = False

    def __str__(self) -> str:
        height, width = self.image_size
        if self.squash:
            return f"resized to {height}x{width} ({self.interpolation}), aspect ignored"
        resized = " x ".join(str(math.floor(side / self.crop)) for side in sorted(set(self.image_size)))
        return f"short side resized to {resized} ({self.interpolation}), centre crop {height}x{width}"

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop_pct={self.crop!r} must lie in (0, 1]")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"mean={self.mean} and std={self.std} must both have 1 value (grey) or 3 (RGB)")


def inputs_for(model: nn.Module, dataset: str | None = None) -> Inputs:
    """A model's own size, mean and std with the protocol of a data set, which decides about crops.

    dataset: by name. None is any picture, prepared as ImageNet's are: resized to 8/7 of the size, then cropped.
    Every command that shows pictures to a model goes by this, so that each shows it the same.
    """
    from timm.data import resolve_data_config

    config = resolve_data_config({}, model=model)
    size = tuple(getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:])
    found = Inputs((int(size[0]), int(size[1])), tuple(config["mean"]), tuple(config["std"]))
    if dataset is None:
        return found
    protocol = dataset_named(dataset)
    return replace(found, crop=protocol.crop, squash=protocol.squash)


def evaluation_transform(inputs: Inputs, *, normalise: bool = True) -> Transform:
    """Resize, centre crop, normalise. normalise: False leaves pixels as bytes, for `Normalise` to do it later."""
    from timm.data import create_transform
    from torchvision.transforms import Compose

    prepare = create_transform(
        inputs.image_size,
        interpolation=inputs.interpolation,
        mean=inputs.mean,
        std=inputs.std,
        crop_pct=1.0 if inputs.squash else inputs.crop,
        crop_mode="squash" if inputs.squash else "center",
        normalize=normalise,
    )
    transform: Transform = Compose([Mode(inputs), prepare])
    return transform


def train_transform(inputs: Inputs, augmentation: Augmentation) -> Transform:
    """Random crop, flip, augmentation, normalise, erase. Randomness is that of torch, random and numpy."""
    from timm.data.random_erasing import RandomErasing
    from torchvision import transforms

    steps: list[Any] = [Mode(inputs), *_framing(inputs, augmentation)]
    if augmentation.flip:
        steps.append(transforms.RandomHorizontalFlip(augmentation.flip))
    if augmentation.cutout:
        steps.append(Cutout())
    if augmentation.randaugment:
        steps.append(_randaugment(inputs, augmentation.randaugment))
    elif augmentation.colour_jitter:
        steps.append(transforms.ColorJitter(*[augmentation.colour_jitter] * 3))
    steps += [transforms.ToTensor(), transforms.Normalize(inputs.mean, inputs.std)]
    if augmentation.erasing:
        steps.append(RandomErasing(augmentation.erasing, mode="pixel", max_count=1, device="cpu"))
    transform: Transform = transforms.Compose(steps)
    return transform


def _framing(inputs: Inputs, augmentation: Augmentation) -> list[Any]:
    from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode
    from torchvision import transforms

    if inputs.squash or augmentation.shift is not None:
        resize = transforms.Resize(inputs.image_size, interpolation=str_to_interp_mode(inputs.interpolation))
        if augmentation.shift is None:
            return [resize]
        return [resize, transforms.RandomCrop(inputs.image_size, padding=augmentation.shift)]
    return [
        RandomResizedCropAndInterpolation(
            inputs.image_size, augmentation.scale, augmentation.ratio, interpolation=inputs.interpolation
        )
    ]


def _randaugment(inputs: Inputs, policy: str) -> Any:
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import str_to_pil_interp

    if len(inputs.mean) == 1:
        raise ValueError(f"randaugment={policy!r} is for colour pictures, and the model takes grey ones")
    hints = {
        "translate_const": int(min(inputs.image_size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in inputs.mean),
        "interpolation": str_to_pil_interp(inputs.interpolation),
    }
    return rand_augment_transform(policy, hints)


class Normalise:
    """Bytes (B, C, H, W) on any device -> what `evaluation_transform` gives with normalise=True."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._mean, self._std = mean, std

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (self._mean, self._std))
        return (pixels.float() / 255 - mean) / std


class Mode:
    """Grey or RGB, as the model takes it."""

    def __init__(self, inputs: Inputs) -> None:
        self._mode = "L" if len(inputs.mean) == 1 else "RGB"

    def __call__(self, image: Any) -> Any:
        return image if image.mode == self._mode else image.convert(self._mode)


class Cutout:
    """One rectangle of half the side in one random colour, centred at any pixel and clipped at the border."""

    def __call__(self, image: Any) -> Any:
        width, height = image.size
        centre_x, centre_y = random.randrange(width), random.randrange(height)
        box = (
            max(centre_x - width // 4, 0),
            max(centre_y - height // 4, 0),
            min(centre_x + width // 4, width),
            min(centre_y + height // 4, height),
        )
        colour = tuple(random.randrange(256) for _ in image.getbands())
        image = image.copy()
        image.paste(colour[0] if len(colour) == 1 else colour, box)
        return image
