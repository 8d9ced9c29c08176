"""Transforms from a PIL image to a normalised tensor: timm's, and the Cutout of the study."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from torch import nn

from agglo.checks import choice
from agglo.lab.tasks.classification.data import Augmentation, DataSet, dataset_named
from agglo.models.inputs import Inputs, Mode, Normalise, Transform, evaluation_transform
from agglo.models.libraries import TIMM, library_of, own_inputs

__all__ = ["FRAMES", "STUDY", "Inputs", "Normalise", "evaluation_transform", "inputs_for", "train_transform"]

STUDY, MODEL = FRAMES = ("study", "model")


def inputs_for(model: nn.Module, dataset: str | None = None, frame: str | None = None) -> Inputs:
    """Return the inputs that a model takes of a data set; size, mean and deviation are those of its own configuration.

    Every command that runs a model on images uses this, so that all prepare them alike.

    Args:
        model: The model.
        dataset: Its name; None is any image, prepared as ImageNet's are.
        frame: How an image is resized and cropped. "study": as the study does it, resized (bicubic) to 8/7 of the size
            and cropped unless the data set says otherwise. "model": as the model's library does it. None is "study" for
            timm's models, and for others "model" unless the data set is one that is never cropped.
    """
    choice("frame", frame, (None, *FRAMES))
    found = own_inputs(model)
    protocol = None if dataset is None else dataset_named(dataset)
    if frame is None:
        is_whole = protocol is not None and (protocol.squash or protocol.crop == 1)
        frame = STUDY if is_whole or library_of(model) is TIMM else MODEL
    if frame == MODEL:
        return found
    crop, squash = _framed(protocol)
    return replace(found, interpolation=Inputs.interpolation, crop=crop, squash=squash)


def _framed(protocol: DataSet | None) -> tuple[float, bool]:
    """Return crop and squash of a data set, as `Inputs` has them."""
    if protocol is None:
        return Inputs.crop, Inputs.squash
    return (1.0 if protocol.squash else protocol.crop), protocol.squash


def train_transform(inputs: Inputs, augmentation: Augmentation) -> Transform:
    """Return the transform of training images: random crop, flip, augmentation, normalisation, erasing.

    It draws from the generators of torch, random and numpy.
    """
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
        raise ValueError(f"randaugment={policy!r} is for colour images, and the model takes grey ones")
    hints = {
        "translate_const": int(min(inputs.image_size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in inputs.mean),
        "interpolation": str_to_pil_interp(inputs.interpolation),
    }
    return rand_augment_transform(policy, hints)


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
