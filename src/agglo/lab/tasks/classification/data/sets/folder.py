"""Any data set of one folder per class."""

from __future__ import annotations

import os
from pathlib import Path

from agglo.lab.data.image_files import Files
from agglo.lab.tasks.classification.data import DataSet, Listing, register

_SPLITS = {"train": ("train",), "val": ("val", "validation", "test")}


def read_folder(root: Path, split: str) -> Listing:
    """List a split, whose classes are the folders in sorted order; files below a folder are its images."""
    folder = split_folder(root, split)
    return read_classes(folder, class_names(folder))


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
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def read_classes(folder: Path, classes: list[str], present: list[str] | None = None) -> Listing:
    """List the images below class folders; `present` names the classes that have one, None is all of them."""
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
    """Return the files of a class that are not hidden, relative to the folder and sorted."""
    found = []
    for place, _, names in os.walk(folder / class_name, followlinks=True):
        inside = Path(place).relative_to(folder).as_posix()
        found += [f"{inside}/{name}" for name in names if not name.startswith(".")]
    return sorted(found)


FOLDER = register(DataSet("folder", "class folders of any names, as such or below val/ and train/", read_folder))
