"""ImageNet-1K: one folder per class, named by its WordNet id."""

from __future__ import annotations

from pathlib import Path

from agglo.lab.tasks.classification.data import DataSet, Listing, register
from agglo.lab.tasks.classification.data.sets.folder import class_names, read_classes, split_folder


def read_imagenet(root: Path, split: str) -> Listing:
    """List a split; a class keeps its index among ImageNet's 1000 even if only some of them have folders."""
    folder = split_folder(root, split)
    found, all_classes = class_names(folder), imagenet_classes()
    strange = sorted(set(found) - set(all_classes))
    if not found and any(path.suffix.lower() == ".jpeg" for path in folder.iterdir()):
        raise ValueError(f"{str(folder)!r} holds images but no class folders; ImageNet's are one folder per WordNet id")
    if strange:
        raise ValueError(
            f"{str(folder)!r} has folders that are no ImageNet-1K class: {', '.join(strange[:5])}; "
            "--dataset folder takes any class folders"
        )
    return read_classes(folder, all_classes, found)


def imagenet_classes() -> list[str]:
    """Return the 1000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_names())


register(
    DataSet(
        "imagenet",
        "ImageNet-1K: class folders named by WordNet ids, as such or below val/ and train/",
        read_imagenet,
        class_folders=imagenet_classes,
    )
)
