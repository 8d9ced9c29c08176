"""One folder a class: any data set, and ImageNet-1K, whose folders are WordNet ids."""

from __future__ import annotations

import os
from pathlib import Path

from agglo.classification.data.base import Files, Listing

_SPLITS = {"train": ("train",), "val": ("val", "validation", "test")}


def read_folder(root: Path, split: str) -> Listing:
    """Classes are the folders in sorted order, whatever the split; files below a folder are its images."""
    folder = split_folder(root, split)
    return _read(folder, class_names(folder))


def read_imagenet(root: Path, split: str) -> Listing:
    """A class keeps its place among ImageNet's 1000 even if only some of them have folders."""
    folder = split_folder(root, split)
    found, all_classes = class_names(folder), imagenet_classes()
    strange = sorted(set(found) - set(all_classes))
    if not found and any(path.suffix.lower() == ".jpeg" for path in folder.iterdir()):
        raise ValueError(f"{str(folder)!r} holds images but no class folders; ImageNet's are one folder a WordNet id")
    if strange:
        raise ValueError(
            f"{str(folder)!r} has folders that are no ImageNet-1K class: {', '.join(strange[:5])}; "
            "--dataset folder takes any class folders"
        )
    return _read(folder, all_classes, found)


def imagenet_classes() -> list[str]:
    """The 1000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_names())


def split_folder(root: Path, split: str) -> Path:
    """Where a split's class folders are: a subfolder of its name, or for evaluation the root itself."""
    for name in _SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    if split == "val" and not (root / "train").is_dir():
        return root
    raise ValueError(f"{str(root)!r} has no folder {' or '.join(map(repr, _SPLITS[split]))}")


def class_names(folder: Path) -> list[str]:
    """Subfolders, sorted; hidden ones are none."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _read(folder: Path, classes: list[str], present: list[str] | None = None) -> Listing:
    from PIL import Image

    endings = frozenset(Image.registered_extensions())
    if not classes:
        raise ValueError(f"{str(folder)!r} has no class folders")
    paths: list[str] = []
    targets: list[int] = []
    bad: list[str] = []
    number = {name: index for index, name in enumerate(classes)}
    for name in classes if present is None else present:
        files = _files(folder, name)
        images = [path for path in files if os.path.splitext(path)[1].lower() in endings]
        bad += [f"{str(folder / path)!r} is not an image by its ending" for path in sorted(set(files) - set(images))]
        if not images:
            bad.append(f"class folder {str(folder / name)!r} holds no image")
        paths += images
        targets += [number[name]] * len(images)
    return Listing(classes, Files(folder, paths), targets, bad=bad)


def _files(folder: Path, class_name: str) -> list[str]:
    """Relative to folder, sorted. Hidden files are the system's, not the data set's."""
    found = []
    for place, _, names in os.walk(folder / class_name, followlinks=True):
        inside = Path(place).relative_to(folder).as_posix()
        found += [f"{inside}/{name}" for name in names if not name.startswith(".")]
    return sorted(found)
