"""Which data set lies in a folder, where its files tell."""

from __future__ import annotations

from pathlib import Path

from agglo.classification.data.folder import class_names, imagenet_classes, split_folder

_SIGNS = {
    "nabirds": ("image_class_labels.txt",),
    "coco": ("annotations/instances_*2014.json",),
    "nuswide": ("nus_wid_data.csv",),
    "hf": ("dataset_dict.json", "state.json", "*.parquet", "data/*.parquet"),
    "fashion-mnist": ("t10k-images-idx3-ubyte*", "FashionMNIST/raw/t10k-images-idx3-ubyte*"),
}


def detect(root: Path) -> str:
    """The name of the data set. Class folders are ImageNet's if every one is an ImageNet-1K WordNet id."""
    if not root.is_dir():
        raise ValueError(f"data={str(root)!r} is not a folder")
    signs = {name: path for name, patterns in _SIGNS.items() for pattern in patterns for path in root.glob(pattern)}
    if len(signs) > 1:
        told = ", ".join(f"{name} ({path.name})" for name, path in signs.items())
        raise ValueError(f"{str(root)!r} looks like several data sets: {told}; --dataset says which")
    if signs:
        return next(iter(signs))
    classes = class_names(split_folder(root, "val"))
    if not classes:
        raise ValueError(f"{str(root)!r} looks like no data set that is known: no class folders, no index file")
    return "imagenet" if set(classes) <= set(imagenet_classes()) else "folder"
