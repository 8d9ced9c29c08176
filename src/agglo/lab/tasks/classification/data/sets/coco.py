"""COCO 2014 with several labels per image: train2014, val2014 and annotations/instances_{train,val}2014.json."""

from __future__ import annotations

import json
from pathlib import Path

from agglo.lab.data.image_files import require_file
from agglo.lab.tasks.classification.data import SEVERAL_LABELS, DataSet, Listing, present_files, register


def read_coco(root: Path, split: str) -> Listing:
    """List a split: an image shows every category that it has an object of, of any size, crowds included.

    Classes are in the order of the annotation file's categories. Images without any object are left out, as in the
    study.
    """
    annotations = require_file(root / "annotations" / f"instances_{split}2014.json")
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        classes = [str(category["name"]) for category in content["categories"]]
        number = {category["id"]: index for index, category in enumerate(content["categories"])}
        file_names: dict[int, str] = {image["id"]: image["file_name"] for image in content["images"]}
        objects = [(entry["id"], entry["image_id"], entry["category_id"]) for entry in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(annotations)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    bad: list[str] = []
    shown: dict[int, set[int]] = {}
    for entry, image, category in objects:
        if image not in file_names:
            bad.append(f"annotation {entry} is of image {image}, which {annotations.name} does not list")
        elif category not in number:
            bad.append(f"annotation {entry} is of category {category}, which {annotations.name} does not list")
        else:
            shown.setdefault(image, set()).add(number[category])

    entries = (
        (f"image {image} of {annotations.name}", file_name, tuple(sorted(shown[image])))
        for image, file_name in file_names.items()
        if image in shown
    )
    files, targets = present_files(root / f"{split}2014", entries, bad)
    without = len(file_names) - len(shown)
    remarks = [f"{without} of {len(file_names)} images show no object and are left out, as in the study"]
    return Listing(classes, files, targets, True, bad, remarks if without else [])


register(
    DataSet(
        "coco",
        "COCO 2014: train2014/, val2014/ and annotations/; several labels per image",
        read_coco,
        signs=("annotations/instances_*2014.json",),
        squash=True,
        augmentation=SEVERAL_LABELS,
    )
)
