"""COCO 2014 with several labels per image: train2014, val2014 and annotations/instances_{train,val}2014.json."""

from __future__ import annotations

import json
from pathlib import Path

from agglo.classification.data.augmentation import SEVERAL_LABELS
from agglo.classification.data.base import Listing
from agglo.classification.data.registry import DataSet, register
from agglo.experiments.image_files import Files, require_file


def read_coco(root: Path, split: str) -> Listing:
    """An image shows every category that it has an object of, of any size, crowds included. Classes are in the order
    of the annotation file's categories. Images without any object are left out, as in the study."""
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

    folder = root / f"{split}2014"
    paths: list[str] = []
    targets: list[tuple[int, ...]] = []
    for image, file_name in file_names.items():
        if image not in shown:
            continue
        if (folder / file_name).is_file():
            paths.append(file_name)
            targets.append(tuple(sorted(shown[image])))
        else:
            bad.append(f"image {image} of {annotations.name} is missing: {str(folder / file_name)!r}")
    without = len(file_names) - len(shown)
    remarks = [f"{without} of {len(file_names)} images show no object and are left out, as in the study"]
    return Listing(classes, Files(folder, paths), targets, True, bad, remarks if without else [])


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
