"""Data sets by name: how each is recognised, read and prepared, and the images of a split with their classes.

`formats.py` holds those that come with agglo; any module can register its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from agglo.checks import choice
from agglo.lab.data.image_files import Files
from agglo.lab.options import Amount, Fraction, option

__all__ = ["Augmentation", "ClassificationData", "DataSet", "Files", "detect", "open_split", "register"]

_SAMPLED = 256  # images whose content a fingerprint reads


@dataclass(eq=False)
class ClassificationData(Dataset[tuple[Any, Any]]):
    """One split: [i] -> (transform(PIL image), target); the target is a float tensor (classes,) if multi_label.

    `images` opens them one by one: `Files`, or what has the same methods. `targets` are the class of each image; with
    multi_label a tuple of classes.
    """

    classes: list[str]
    images: Any
    targets: Sequence[int | tuple[int, ...]]
    multi_label: bool = False
    name: str = ""
    transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int | Tensor]:
        image, target = self.images.open(index), self.targets[index]
        label: Any = target
        if isinstance(target, tuple):
            label = torch.zeros(len(self.classes)).index_fill_(0, torch.tensor(target, dtype=torch.long), 1)
        return image if self.transform is None else self.transform(image), label

    def fingerprint(self) -> str:
        """Return a short hash of the names, targets and sizes of all images, and of the content of some of them.

        To read all of a large data set would take longer than many evaluations.
        """
        found = hashlib.sha256("\n".join(self.classes).encode())
        for index, target in enumerate(self.targets):
            found.update(f"\n{self.images.name(index)} {target} {self.images.size(index)}".encode())
        for index in range(0, len(self), math.ceil(len(self) / _SAMPLED)):
            found.update(self.images.content(index))
        return found.hexdigest()[:16]


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of training images; the defaults are DeiT's."""

    randaugment: str | None = option("rand-m9-mstd0.5-inc1", "timm's RandAugment policy")
    colour_jitter: Amount = option(0.0, "of brightness, contrast and saturation; has no effect with randaugment")
    erasing: Fraction = option(0.25, "probability of random erasing")
    cutout: bool = option(False, "one rectangle of half the side in a random colour")
    flip: Fraction = option(0.5, "probability of mirroring an image")
    shift: int | None = option(None, "in place of a random crop: pixels an image moves at most")


@dataclass(frozen=True)
class DataSet:
    """A data set: how it is recognised, read and prepared.

    Args:
        about: What lies in its folder, in a few words, for help pages.
        read: Given the folder and "train" or "val", returns what is in that split.
        signs: Glob patterns of files that only this data set has; one match in a folder is enough to recognise it.
        crop: Fraction of the resized image's side that is left when evaluating.
        squash: Resize to the image size itself, whatever the proportions, and crop nothing.
        augmentation: Augmentation of training images, unless a recipe says otherwise.
    """

    name: str
    about: str
    read: Callable[[Path, str], ClassificationData]
    signs: tuple[str, ...] = ()
    crop: float = 0.875
    squash: bool = False
    augmentation: Augmentation = field(default_factory=Augmentation)


_KNOWN: dict[str, DataSet] = {}


def register(dataset: DataSet) -> DataSet:
    """Register a data set by its name, and return it.

    The same name again replaces it only if it comes from the same module, as when a notebook's cell runs twice.
    """
    known = _KNOWN.get(dataset.name)
    if known is not None and known.read.__module__ != dataset.read.__module__:
        raise ValueError(f"data set name {dataset.name!r} is taken by {known.read.__module__}")
    _KNOWN[dataset.name] = dataset
    return dataset


def dataset_named(name: str) -> DataSet:
    return _KNOWN[choice("dataset", name, dataset_names())]


def dataset_names() -> list[str]:
    import_module(f"{__name__}.formats")
    return sorted(_KNOWN)


def open_split(
    name: str | None, root: Path, split: str, *, transform: Callable[[Any], Any] | None = None
) -> ClassificationData:
    """Open one split of a data set on disk, "train" or "val"; without a name its files show which data set it is.

    Raises:
        ValueError: A file is missing. An unreadable image raises BadImageError when it is asked for.
    """
    dataset = dataset_named(detect(root) if name is None else name)
    choice("split", split, ("train", "val"))
    _require_folder(root)
    data = dataset.read(root, split)
    data.name, data.transform = dataset.name, transform
    if not len(data):
        raise ValueError(f"{data.name}: split {split!r} of {str(root)!r} holds no images")
    return data


def detect(root: Path) -> str:
    """Return the name of the data set whose signs are in a folder.

    Without signs, class folders are ImageNet's if all their names are WordNet ids of it, and otherwise the data set
    `folder`.
    """
    from agglo.lab.tasks.classification.data.formats import class_names, imagenet_classes, split_folder

    _require_folder(root)
    known = [dataset_named(name) for name in dataset_names()]
    found = [dataset.name for dataset in known if any(any(root.glob(sign)) for sign in dataset.signs)]
    if len(found) > 1:
        raise ValueError(f"{str(root)!r} looks like several data sets: {', '.join(found)}; --dataset says which")
    if found:
        return found[0]
    folders = class_names(split_folder(root, "val"))
    if not folders:
        raise ValueError(f"{str(root)!r} looks like no data set that is known: no class folders, no index file")
    return "imagenet" if set(folders) <= set(imagenet_classes()) else "folder"


def _require_folder(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"data={str(root)!r} is not a folder")
