"""Transforms from a PIL image to a normalised tensor: timm's, and the Cutout of the study."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from torch import nn

from agglo.checks import choice
from agglo.lab.tasks.classification.data import Augmentation, dataset_named
from agglo.models.inputs import Inputs, Transform, convert, evaluation_transform
from agglo.models.libraries import TIMM, library_of, own_inputs

__all__ = ["FRAMES", "STUDY", "Inputs", "evaluation_transform", "inputs_for", "train_transform"]

STUDY, MODEL = FRAMES = ("study", "model")


def inputs_for(model: nn.Module, dataset: str | None = None, frame: str | None = None) -> Inputs:
    """Return how images of a data set are prepared for a model, with the model's own size, mean and deviation.

    Every command that runs a model on images uses this.

    Args:
        dataset: Its name; None is any image, prepared as ImageNet's are.
        frame: How an image is resized and cropped. "study": as the study does it, resized (bicubic) to 8/7 of the size
            and cropped unless the data set says otherwise. "model": as the model's library does it. None is "study" for
            timm's models, and for others "model" unless the data set is one that is never cropped.
    """
    choice("frame", frame, (None, *FRAMES))
    found = own_inputs(model)
    protocol = dataset_named("imagenet" if dataset is None else dataset)
    crop = 1.0 if protocol.squash else protocol.crop
    if frame is None:
        frame = STUDY if crop == 1 or library_of(model) is TIMM else MODEL
    if frame == MODEL:
        return found
    return replace(found, interpolation=Inputs.interpolation, crop=crop, squash=protocol.squash)


def train_transform(inputs: Inputs, augmentation: Augmentation) -> Transform:
    """Return the transform of training images: random crop, flip, augmentation, normalisation, erasing.

    It draws from the generators of torch, random and numpy.
    """
    from timm.data.transforms import str_to_interp_mode
    from timm.data.transforms_factory import transforms_imagenet_train
    from torchvision import transforms

    if augmentation.randaugment and len(inputs.mean) == 1:
        raise ValueError(
            f"randaugment={augmentation.randaugment!r} is for colour images, and the model takes grey ones"
        )
    frame, colours, final = transforms_imagenet_train(
        inputs.image_size,
        hflip=augmentation.flip,
        color_jitter=augmentation.colour_jitter or None,
        auto_augment=augmentation.randaugment,
        interpolation=inputs.interpolation,
        mean=inputs.mean,
        std=inputs.std,
        re_prob=augmentation.erasing,
        re_mode="pixel",
        separate=True,
    )
    if inputs.squash or augmentation.shift is not None:
        # In place of timm's random resized crop, the first step.
        whole = [transforms.Resize(inputs.image_size, interpolation=str_to_interp_mode(inputs.interpolation))]
        if augmentation.shift is not None:
            whole.append(transforms.RandomCrop(inputs.image_size, padding=augmentation.shift))
        frame.transforms[:1] = whole
    cutout = [Cutout()] if augmentation.cutout else []
    steps = [convert(inputs), *frame.transforms, *cutout, *colours.transforms, *final.transforms]
    return transforms.Compose(steps)


class Cutout:
    """One rectangle of half the side in one random colour, centred at any pixel and clipped at the border."""

    def __call__(self, image: Any) -> Any:
        width, height = image.size
        x, y = random.randrange(width), random.randrange(height)
        box = (x - width // 4, y - height // 4, x + width // 4, y + height // 4)
        colour = tuple(random.randrange(256) for _ in image.getbands())
        image = image.copy()
        image.paste(colour[0] if len(colour) == 1 else colour, box)
        return image
