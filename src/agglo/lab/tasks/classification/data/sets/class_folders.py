"""Data sets of one folder per class: ImageNet-1K, whose folders are WordNet ids, and any other."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from agglo.lab.data.image_files import Files
from agglo.lab.tasks.classification.data import DataSet, Listing, register

_SPLITS = {"train": ("train",), "val": ("val", "validation", "test")}


def read_folder(root: Path, split: str) -> Listing:
    """List a split, whose classes are the folders in sorted order; files below a folder are its images."""
    folder = split_folder(root, split)
    classes = class_names(folder)
    return _listing(folder, classes, classes)


def read_imagenet(root: Path, split: str) -> Listing:
    """List a split; a class keeps its index among ImageNet's 1000 even if only some of them have folders."""
    folder = split_folder(root, split)
    present, classes = class_names(folder), imagenet_classes()
    if unknown := sorted(set(present) - set(classes)):
        raise ValueError(
            f"{str(folder)!r} has folders that are no ImageNet-1K class: {', '.join(unknown[:5])}; "
            "--dataset folder takes any class folders"
        )
    return _listing(folder, classes, present)


@cache
def imagenet_classes() -> list[str]:
    """Return the 1000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_names())


def split_folder(root: Path, split: str) -> Path:
    """Return the folder of a split's class folders: a subfolder of its name, or for evaluation the root itself."""
    for name in _SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    if split == "val" and not (root / "train").is_dir():
        return root
    raise ValueError(f"{str(root)!r} has no folder {' or '.join(map(repr, _SPLITS[split]))}")


def class_names(folder: Path) -> list[str]:
    """Return the names of subfolders that are not hidden, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _listing(folder: Path, classes: list[str], present: list[str]) -> Listing:
    """List the images below the folders of the classes that are present."""
    from PIL import Image

    if not present:
        raise ValueError(f"{str(folder)!r} has no class folders")
    endings = frozenset(Image.registered_extensions())
    paths: list[str] = []
    targets: list[int] = []
    bad: list[str] = []
    for name in present:
        files: list[str] = []
        for where, _, inside in os.walk(folder / name, followlinks=True):
            place = Path(where).relative_to(folder).as_posix()
            files += [f"{place}/{file}" for file in inside if not file.startswith(".")]
        images = sorted(file for file in files if os.path.splitext(file)[1].lower() in endings)
        bad += [f"{str(folder / file)!r} is not an image by its ending" for file in sorted({*files} - {*images})]
        if not images:
            bad.append(f"class folder {str(folder / name)!r} holds no image")
        paths += images
        targets += [classes.index(name)] * len(images)
    return Listing(classes, Files(folder, paths), targets, bad=bad)


register(
    DataSet(
        "imagenet", "ImageNet-1K: class folders named by WordNet ids, as such or below val/ and train/", read_imagenet
    )
)
register(DataSet("folder", "class folders of any names, as such or below val/ and train/", read_folder))
