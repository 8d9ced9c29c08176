"""NABirds: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, and the images under images/."""

from __future__ import annotations

from pathlib import Path

from agglo.lab.data.image_files import require_file
from agglo.lab.tasks.classification.data import Augmentation, DataSet, Listing, present_files, register

_FLAGS = {"train": "1", "val": "0"}


def read_nabirds(root: Path, split: str) -> Listing:
    """List a split; classes are those of all images of both splits, in the order of their numbers."""
    paths = _table(root / "images.txt")
    labels = _table(root / "image_class_labels.txt")
    flags = _table(root / "train_test_split.txt")
    names = _table(root / "classes.txt")
    for file, table in (("image_class_labels.txt", labels), ("train_test_split.txt", flags)):
        if missing := sorted(paths.keys() - table.keys()):
            raise ValueError(f"image {missing[0]} of images.txt is not in {file}")
    used = sorted({labels[image] for image in paths}, key=lambda label: (len(label), label))
    indices = {label: index for index, label in enumerate(used)}
    entries = ((path, indices[labels[image]]) for image, path in paths.items() if flags[image] == _FLAGS[split])
    files, targets, bad = present_files(root / "images", entries, "images.txt")
    return Listing([names.get(label, label) for label in used], files, targets, bad=bad)


def _table(path: Path) -> dict[str, str]:
    """Read lines of a key, a space, and a value."""
    require_file(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return dict(line.strip().split(" ", 1) for line in lines if line.strip())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not lines of a key and a value: {error}") from error


register(
    DataSet(
        "nabirds",
        "NABirds: images.txt, image_class_labels.txt, ... and images/",
        read_nabirds,
        signs=("image_class_labels.txt",),
        augmentation=Augmentation(randaugment=None, colour_jitter=0.3),
    )
)
