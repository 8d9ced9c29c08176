"""NABirds: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, and the images under images/."""

from __future__ import annotations

from pathlib import Path

from agglo.lab.data.image_files import require_file
from agglo.lab.tasks.classification.data import Augmentation, DataSet, Listing, present_files, register

_FLAG = {"train": "1", "val": "0"}


def read_nabirds(root: Path, split: str) -> Listing:
    """List a split.

    Classes are those of all images that images.txt lists, of either split and whether or not their files are there,
    in the order of their numbers.
    """
    paths = _table(root / "images.txt")
    labels = _table(root / "image_class_labels.txt")
    flags = _table(root / "train_test_split.txt")
    names = _table(root / "classes.txt")
    used = sorted({labels[image] for image in paths if image in labels}, key=lambda label: (len(label), label))
    number = {label: index for index, label in enumerate(used)}
    per_image = {"image_class_labels.txt": labels, "train_test_split.txt": flags}
    entries: list[tuple[str, str, int]] = []
    bad: list[str] = []
    for image, path in paths.items():
        missing = [file for file, table in per_image.items() if image not in table]
        if missing:
            bad.append(f"image {image} ({path}) of images.txt is not in {' nor in '.join(missing)}")
        elif flags[image] not in _FLAG.values():
            bad.append(f"image {image} ({path}) has split {flags[image]!r} in train_test_split.txt, not 0 or 1")
        elif flags[image] == _FLAG[split]:
            entries.append((f"image {image} of images.txt", path, number[labels[image]]))
    for image in dict.fromkeys(image for table in per_image.values() for image in table if image not in paths):
        named = " and ".join(file for file, table in per_image.items() if image in table)
        bad.append(f"image {image} of {named} is not in images.txt")
    files, targets = present_files(root / "images", entries, bad)
    return Listing([names.get(label, label) for label in used], files, targets, bad=bad)


def _table(path: Path) -> dict[str, str]:
    """Read lines of a key, a space, and a value."""
    table = {}
    try:
        lines = require_file(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    for count, line in enumerate(lines, 1):
        key, _, value = line.strip().partition(" ")
        if not line.strip():
            continue
        if not value or key in table:
            raise ValueError(f"{str(path)!r} line {count}: {line!r} {'has no value' if not value else 'comes twice'}")
        table[key] = value.strip()
    return table


register(
    DataSet(
        "nabirds",
        "NABirds: images.txt, image_class_labels.txt, ... and images/",
        read_nabirds,
        signs=("image_class_labels.txt",),
        augmentation=Augmentation(randaugment=None, colour_jitter=0.3),
    )
)
