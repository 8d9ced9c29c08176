"""Data sets by name. One file per format, in `sets`; each gives a Listing, and `open_split` makes a ClassificationData
of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agglo.classification.data.augmentation import Augmentation
from agglo.classification.data.base import ClassificationData, Listing
from agglo.classification.data.recognition import detect
from agglo.classification.data.registry import DataSet, dataset_named, dataset_names, register
from agglo.experiments.image_files import BadImageError, Files

__all__ = [
    "Augmentation",
    "BadImageError",
    "ClassificationData",
    "DataSet",
    "Files",
    "Listing",
    "dataset_named",
    "dataset_names",
    "detect",
    "open_split",
    "register",
]

_SPLITS = {"train": "train", "val": "val", "test": "val"}


def open_split(
    name: str,
    root: Path,
    split: str,
    *,
    transform: Callable[[Any], Any] | None = None,
    skip_bad: bool = False,
) -> ClassificationData:
    """One split of a data set on disk.

    name: one of `dataset_names()`.
    split: "train", or "val" (also called "test") to evaluate on.
    skip_bad: warn about missing and unreadable images and go on without; decodes every image once to find them.
        Otherwise a missing file raises ValueError here, an unreadable image BadImageError when it is asked for.
    """
    dataset = dataset_named(name)
    if split not in _SPLITS:
        raise ValueError(f"split={split!r} is not known; accepted: {', '.join(map(repr, _SPLITS))}")
    if not root.is_dir():
        raise ValueError(f"data={str(root)!r} is not a folder")
    listing = dataset.read(root, _SPLITS[split])
    place = f"split {split!r} of {str(root)!r}"
    return ClassificationData(name, listing, place=place, transform=transform, skip_bad=skip_bad)
