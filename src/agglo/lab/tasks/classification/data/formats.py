"""The formats of data sets that come with agglo: each lists the images of a split, and is registered by its name."""

from __future__ import annotations

import ast
import csv
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agglo.lab.data.fashion_mnist import CLASSES, FOLDERS, PREFIXES, read_split
from agglo.lab.data.image_files import Files, listed, require_file
from agglo.lab.tasks.classification.data import Augmentation, ClassificationData, DataSet, register

T = TypeVar("T")
_FOLDERS = {"train": ("train",), "val": ("val", "validation", "test")}
_NABIRDS = {"train": "1", "val": "0"}
_NUSWIDE = "nus_wid_data.csv"
# The study's, for images with several labels: Cutout in place of flips and random erasing, and nothing is cropped.
_SEVERAL_LABELS: Any = {"squash": True, "augmentation": Augmentation(flip=0.0, erasing=0.0, cutout=True)}


def present_files(folder: Path, entries: Iterable[tuple[str, T]], source: str) -> tuple[Files, list[T]]:
    """Return the files and targets of (path, target) entries; ValueError names those whose file is missing."""
    entries = list(entries)
    if missing := [str(folder / path) for path, _ in entries if not (folder / path).is_file()]:
        raise ValueError(f"{len(missing)} of the {len(entries)} images of {source} are missing: {listed(missing)}")
    return Files(folder, [path for path, _ in entries]), [target for _, target in entries]


# Class folders: ImageNet-1K, whose folders are WordNet ids, and any other.


def read_folder(root: Path, split: str) -> ClassificationData:
    """List a split, whose classes are the folders in sorted order; files below a folder are its images."""
    folder = split_folder(root, split)
    classes = class_names(folder)
    return _class_folders(folder, classes, classes)


def read_imagenet(root: Path, split: str) -> ClassificationData:
    """List a split; a class keeps its index among ImageNet's 1000 even if only some of them have folders."""
    folder = split_folder(root, split)
    present, classes = class_names(folder), imagenet_classes()
    if unknown := sorted(set(present) - set(classes)):
        raise ValueError(
            f"{str(folder)!r} has folders that are no ImageNet-1K class: {', '.join(unknown[:5])}; "
            "--dataset folder takes any class folders"
        )
    return _class_folders(folder, present, classes)


@cache
def imagenet_classes() -> list[str]:
    """Return the 1000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_names())


def split_folder(root: Path, split: str) -> Path:
    """Return the folder of a split's class folders: a subfolder of its name, or for evaluation the root itself."""
    for name in _FOLDERS[split]:
        if (root / name).is_dir():
            return root / name
    if split == "val" and not (root / "train").is_dir():
        return root
    raise ValueError(f"{str(root)!r} has no folder {' or '.join(map(repr, _FOLDERS[split]))}")


def class_names(folder: Path) -> list[str]:
    """Return the names of subfolders that are not hidden, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_folders(folder: Path, present: list[str], classes: list[str]) -> ClassificationData:
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    if not present:
        raise ValueError(f"{str(folder)!r} has no class folders")

    def is_image(path: str) -> bool:
        return path.lower().endswith(IMG_EXTENSIONS) and not Path(path).name.startswith(".")

    samples = make_dataset(folder, {name: classes.index(name) for name in present}, is_valid_file=is_image)
    start = len(str(folder)) + 1
    return ClassificationData(
        classes,
        Files(folder, [path[start:].replace("\\", "/") for path, _ in samples]),
        [target for _, target in samples],
    )


# Index files: COCO 2014, NABirds and NUS-WIDE.


def read_coco(root: Path, split: str) -> ClassificationData:
    """List a split: an image shows every category that it has an object of, of any size, crowds included.

    Classes are in the order of the annotation file's categories. Images without any object are left out, as in the
    study.
    """
    annotations = require_file(root / "annotations" / f"instances_{split}2014.json")
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        classes = [category["name"] for category in content["categories"]]
        indices = {category["id"]: index for index, category in enumerate(content["categories"])}
        targets: dict[int, set[int]] = {image["id"]: set() for image in content["images"]}
        for entry in content["annotations"]:
            targets[entry["image_id"]].add(indices[entry["category_id"]])
        entries = [(image["file_name"], tuple(sorted(targets[image["id"]]))) for image in content["images"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(annotations)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    shown = [entry for entry in entries if entry[1]]
    if without := len(entries) - len(shown):
        warnings.warn(
            f"{without} of {len(entries)} images show no object and are left out, as in the study", stacklevel=2
        )
    return ClassificationData(classes, *present_files(root / f"{split}2014", shown, annotations.name), multi_label=True)


def read_nabirds(root: Path, split: str) -> ClassificationData:
    """List a split; classes are those of all images of both splits, in the order of their numbers."""
    tables = ("images", "image_class_labels", "train_test_split", "classes")
    paths, labels, flags, names = (_table(root / f"{name}.txt") for name in tables)
    if missing := sorted(image for image in paths if image not in labels or image not in flags):
        raise ValueError(f"image {missing[0]} of images.txt is not in image_class_labels.txt and train_test_split.txt")
    used = sorted({labels[image] for image in paths}, key=lambda label: (len(label), label))
    entries = ((path, used.index(labels[image])) for image, path in paths.items() if flags[image] == _NABIRDS[split])
    return ClassificationData(
        [names.get(label, label) for label in used], *present_files(root / "images", entries, "images.txt")
    )


def _table(path: Path) -> dict[str, str]:
    """Read lines of a key, a space, and a value."""
    lines = require_file(path).read_text(encoding="utf-8").splitlines()
    try:
        return dict(line.strip().split(" ", 1) for line in lines if line.strip())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not lines of a key and a value: {error}") from error


def read_nuswide(root: Path, split: str) -> ClassificationData:
    """List a split; classes are all names in either split, sorted."""
    path, rows = require_file(root / _NUSWIDE), []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = [title.strip().lower().replace("_", "").replace(" ", "") for title in next(reader)]
            columns = [header.index(title) for title in ("filepath", "label", "splitname")]
            for row in filter(None, reader):
                image, label, its_split = (row[column].strip() for column in columns)
                names = ast.literal_eval(label)
                if not isinstance(names, list):
                    raise ValueError(f"{label!r} is no list of labels")
                rows.append((image, names, its_split))
        except Exception as error:  # the csv module, literal_eval and wrong columns fail in many ways
            raise ValueError(
                f"{str(path)!r} line {reader.line_num}: {error}; needed: file path, list of labels, split name"
            ) from error
    classes = sorted({name for _, names, _ in rows for name in names})
    indices = {name: index for index, name in enumerate(classes)}
    entries = ((image, tuple(sorted({indices[name] for name in names}))) for image, names, of in rows if of == split)
    return ClassificationData(classes, *present_files(root, entries, _NUSWIDE), multi_label=True)


# Fashion-MNIST, whose images are no files of their own.


@dataclass(frozen=True)
class Pixels:
    """Grey images of one array (N, H, W)."""

    array: NDArray[np.uint8]
    source: str

    def __len__(self) -> int:
        return len(self.array)

    def open(self, index: int) -> Any:
        from PIL import Image

        return Image.fromarray(self.array[index])

    def name(self, index: int) -> str:
        return f"{self.source}[{index}]"

    def size(self, index: int) -> int:
        return self.array[index].nbytes

    def content(self, index: int) -> bytes:
        return self.array[index].tobytes()


def read_fashion_mnist(root: Path, split: str) -> ClassificationData:
    images, labels = read_split(root, split)
    return ClassificationData(list(CLASSES), Pixels(images, f"{PREFIXES[split]}-images"), labels.tolist())


_IDX = tuple(f"{folder}/t10k-images-idx3-ubyte*".lstrip("/") for folder in FOLDERS)
for dataset in (
    DataSet(
        "imagenet", "ImageNet-1K: class folders named by WordNet ids, as such or below val/ and train/", read_imagenet
    ),
    DataSet("folder", "class folders of any names, as such or below val/ and train/", read_folder),
    DataSet(
        "coco",
        "COCO 2014: train2014/, val2014/ and annotations/; several labels per image",
        read_coco,
        signs=("annotations/instances_*2014.json",),
        **_SEVERAL_LABELS,
    ),
    DataSet(
        "nabirds",
        "NABirds: images.txt, image_class_labels.txt, ... and images/",
        read_nabirds,
        signs=("image_class_labels.txt",),
        augmentation=Augmentation(randaugment=None, colour_jitter=0.3),
    ),
    DataSet(
        "nuswide",
        f"NUS-WIDE: {_NUSWIDE} and the images it names; several labels per image",
        read_nuswide,
        signs=(_NUSWIDE,),
        **_SEVERAL_LABELS,
    ),
    DataSet(
        "fashion-mnist",
        "Fashion-MNIST: its four idx files, plain or .gz, as such or as torchvision lays them",
        read_fashion_mnist,
        signs=_IDX,
        crop=1.0,
        augmentation=Augmentation(shift=2, randaugment=None, erasing=0.0),
    ),
):
    register(dataset)
