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
        classes = [category["name"] for category in content["categories"]]
        indices = {category["id"]: index for index, category in enumerate(content["categories"])}
        targets: dict[int, set[int]] = {image["id"]: set() for image in content["images"]}
        for entry in content["annotations"]:
            targets[entry["image_id"]].add(indices[entry["category_id"]])
        entries = [(image["file_name"], tuple(sorted(targets[image["id"]]))) for image in content["images"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(annotations)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    shown = [entry for entry in entries if entry[1]]
    without = len(entries) - len(shown)
    remarks = [f"{without} of {len(entries)} images show no object and are left out, as in the study"]
    files, found, bad = present_files(root / f"{split}2014", shown, annotations.name)
    return Listing(classes, files, found, True, bad, remarks if without else [])


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
