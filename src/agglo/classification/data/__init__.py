"""Data sets by name. One file a format; each gives a Listing, and `open_split` makes a ClassificationData of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agglo.classification.data.base import BadImageError, ClassificationData, Listing
from agglo.classification.data.coco import read_coco
from agglo.classification.data.fashion_mnist import read_fashion_mnist
from agglo.classification.data.folder import read_folder, read_imagenet
from agglo.classification.data.hugging_face import read_hugging_face
from agglo.classification.data.nabirds import read_nabirds
from agglo.classification.data.nuswide import read_nuswide
from agglo.classification.data.recognition import detect

__all__ = ["DATASETS", "BadImageError", "ClassificationData", "detect", "open_split"]

DATASETS: dict[str, Callable[[Path, str], Listing]] = {
    "imagenet": read_imagenet,
    "nabirds": read_nabirds,
    "coco": read_coco,
    "nuswide": read_nuswide,
    "folder": read_folder,
    "hf": read_hugging_face,
    "fashion-mnist": read_fashion_mnist,
}
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

    name: one of DATASETS.
    split: "train", or "val" (also called "test") to evaluate on.
    skip_bad: warn about missing and unreadable images and go on without; decodes every image once to find them.
        Otherwise a missing file raises ValueError here, an unreadable image BadImageError when it is asked for.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset={name!r} is not known; accepted: {', '.join(map(repr, DATASETS))}")
    if split not in _SPLITS:
        raise ValueError(f"split={split!r} is not known; accepted: {', '.join(map(repr, _SPLITS))}")
    if not root.is_dir():
        raise ValueError(f"data={str(root)!r} is not a folder")
    listing = DATASETS[name](root, _SPLITS[split])
    place = f"split {split!r} of {str(root)!r}"
    return ClassificationData(name, listing, place=place, transform=transform, skip_bad=skip_bad)
