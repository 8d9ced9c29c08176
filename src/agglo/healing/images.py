"""The images of a healing: three disjoint parts of them, and random views of those that are trained on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agglo.models.inputs import Inputs, convert, evaluation_transform
from agglo.models.libraries import own_inputs
from agglo.tuning.images import Batch, read
from agglo.utils.randomness import derived_seed

_MOST_OF_BATCHES = 2000  # images that are taken of a DataLoader, the first ones: they are kept in memory
_MOST_JUDGED = 256  # images of the stopping and of the reporting part: more would take time from training
_SHIFT = 1 / 14  # of the side, at most: a patch of 16 of 224 pixels
_AREA, _RATIO = (0.35, 1.0), (3 / 4, 4 / 3)  # of random crops; smaller crops than torchvision's are hardly seen


class Parts(NamedTuple):
    """Indices of images: to train on, to judge by when to stop, and to report with."""

    training: list[int]
    stopping: list[int]
    reporting: list[int]

    @classmethod
    def of(cls, count: int, seed: int) -> Parts:
        """Put an eighth of the images apart for each of stopping and reporting, in an order that the seed decides."""
        if count < 3:
            raise ValueError(f"{count} images or batches are too few: to train, to stop and to report, 3 are needed")
        order = list(range(count))
        random.Random(seed).shuffle(order)
        apart = min(max(1, count // 8), _MOST_JUDGED)
        return cls(order[2 * apart :], order[:apart], order[apart : 2 * apart])


Draws = Callable[[int], random.Random]  # from the index of an image to what decides its view


@dataclass(frozen=True)
class Tensors:
    """Images as the model takes them, in one tensor or a list."""

    whole: Batch

    def __len__(self) -> int:
        return self.whole.images

    def batch(self, indices: Sequence[int], draws: Draws | None = None) -> Batch:
        """Return images as they are or, given draws, each shifted, and half of them mirrored."""
        found = self.whole.pick(indices)
        if draws is None or found.inputs[0].dim() != 3:
            return found
        views = [_moved_about(image, draws(index)) for image, index in zip(found.inputs, indices, strict=True)]
        return replace(found, inputs=torch.stack(views) if isinstance(found.inputs, Tensor) else views)

    def normalise(self, inputs: Any) -> Any:
        return inputs


@dataclass(frozen=True)
class Batches:
    """Batches that cannot be cut, each counted as one image: dicts or tuples of a model's arguments."""

    batches: Sequence[Batch]

    def __len__(self) -> int:
        return len(self.batches)

    def batch(self, indices: Sequence[int], draws: Draws | None = None) -> Batch:
        [index] = indices
        return self.batches[index]

    def normalise(self, inputs: Any) -> Any:
        return inputs


@dataclass(frozen=True)
class PILImages:
    """Image files or PIL images, perhaps in pairs with their classes, which are opened when they are asked for."""

    images: Any  # a sequence, or a data set
    inputs: Inputs

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Sequence[int], draws: Draws | None = None) -> Batch:
        """Return bytes (B, C, H, W): images as they are judged or, given draws, random crops, half of them mirrored."""
        prepare = evaluation_transform(self.inputs, normalise=False)
        pixels, labels = [], []
        for index in indices:
            item = self.images[index]
            entry, label = item if isinstance(item, tuple) else (item, None)
            image = convert(self.inputs)(_opened(entry))
            size = self.inputs.image_size
            pixels.append(prepare(image) if draws is None else _cropped(image, size, draws(index)))
            labels.append(label)
        are_classes = all(isinstance(label, int) for label in labels)
        return Batch(torch.stack(pixels), torch.tensor(labels) if are_classes else None, len(pixels))

    def normalise(self, inputs: Any) -> Any:
        return self.inputs.normalise(inputs)


Source = Tensors | Batches | PILImages


def source_of(images: Any, model: nn.Module, inputs: Inputs | None, *, tuples_are_inputs: bool) -> Source:
    """Return where batches come from, for anything that `agglo.heal` takes as images."""
    if hasattr(images, "__getitem__") and not isinstance(images, (str, bytes, Tensor, Mapping)) and len(images):
        first = images[0][0] if isinstance(images[0], tuple) else images[0]
        if isinstance(first, (str, PathLike)) or hasattr(first, "convert"):
            return PILImages(images, own_inputs(model) if inputs is None else inputs)
    batches, whole = read(images, tuples_are_inputs=tuples_are_inputs, most=_MOST_OF_BATCHES)
    return Batches(batches) if whole is None else Tensors(whole)


def _opened(entry: Any) -> Any:
    if not isinstance(entry, (str, PathLike)):
        return entry
    from PIL import Image, ImageOps

    with Image.open(entry) as image:
        return ImageOps.exif_transpose(image)


def _moved_about(image: Tensor, chance: random.Random) -> Tensor:
    """Return an image (C, H, W) mirrored or not, and shifted; its edge fills what it leaves empty."""
    if chance.random() < 0.5:
        image = image.flip(-1)
    for axis in (-2, -1):
        side = image.shape[axis]
        most = int(side * _SHIFT)
        rows = torch.arange(side, device=image.device) + chance.randint(-most, most)
        image = image.index_select(axis, rows.clamp(0, side - 1))
    return image


def _cropped(image: Any, size: tuple[int, int], chance: random.Random) -> Tensor:
    """Return a random part of a PIL image at the size of a model, mirrored or not, as bytes (C, H, W)."""
    from PIL import Image

    area = chance.uniform(*_AREA) * image.width * image.height
    ratio = math.exp(chance.uniform(*map(math.log, _RATIO))) * size[1] / size[0]
    width, height = min(math.sqrt(area * ratio), image.width), min(math.sqrt(area / ratio), image.height)
    left, top = chance.uniform(0, image.width - width), chance.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    pixels = np.array(image.resize(size[::-1], Image.Resampling.BICUBIC, box=box))
    found = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1).contiguous()
    return found.flip(-1) if chance.random() < 0.5 else found


def chance_of(*parts: Any) -> random.Random:
    """Return a generator whose seed depends on these alone, so that a resumed run draws what it would have drawn."""
    return random.Random(derived_seed(*parts))
