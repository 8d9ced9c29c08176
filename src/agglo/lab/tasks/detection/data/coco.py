"""COCO instances: the 2017 layout, one JSON next to a folder of images, or any JSON with any folder.

data = open_coco(Path("coco"), "val")
image, target = data[0]
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import reprlib
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agglo.checks import choice
from agglo.lab.data.image_files import BadImageError, Files, listed, require_file
from agglo.lab.tasks.detection.data.base import DetectionData, Target, target_of
from agglo.lab.tasks.detection.data.masks import box_and_area, decode

Entry = dict[str, Any]
Box = tuple[float, float, float, float]

SPLITS = ("train", "val")
_SMALLEST = 1.0  # pixels: MMDetection trains on no object with a shorter side


class CocoImages(DetectionData):
    """Images of a COCO JSON file with their objects.

    Crowds are in the ground truth, where detections of them count as neither right nor wrong, and never in a target.
    Nor are objects with a side below one pixel: COCO's own train2017 has boxes without area. Images without objects
    stay, with empty targets.

    Args:
        annotations: The JSON file.
        images: The folder that its file names are in.
        with_objects: Leave out images without a single object to train on.
    """

    def __init__(self, annotations: Path, images: Path, *, with_objects: bool = False) -> None:
        content = _read(require_file(annotations), images)
        self._categories, self._folder = content["categories"], images
        classes, category_ids = ([category[key] for category in self._categories] for key in ("name", "id"))
        super().__init__(annotations.name, str(annotations), classes, category_ids)
        self._by_image: dict[int, list[Entry]] = {entry["id"]: [] for entry in content["images"]}
        for entry in content["annotations"]:
            self._by_image[entry["image_id"]].append(entry)
        self._choose(entry for entry in content["images"] if not with_objects or self._objects(entry))
        if not len(self):
            raise ValueError(f"{str(annotations)!r} has no image that can be used")

    def _choose(self, images: Iterable[Entry]) -> None:
        self._images = list(images)
        self.image_ids = [entry["id"] for entry in self._images]
        self._files = Files(self._folder, [entry["file_name"] for entry in self._images])

    def _objects(self, image: Entry) -> list[tuple[Entry, Box]]:
        """Return the annotations that an image is trained with, and the parts of their boxes inside it."""
        entries = [entry for entry in self._by_image[image["id"]] if not entry["iscrowd"]]
        objects = [(entry, _inside(entry["bbox"], image)) for entry in entries]
        return [(entry, box) for entry, box in objects if min(box[2] - box[0], box[3] - box[1]) >= _SMALLEST]

    def read(self, index: int) -> tuple[Any, Target]:
        entry, image = self._images[index], self._files.open(index)
        size = (entry["height"], entry["width"])
        if image.size != size[::-1]:
            sizes = f"is {image.size[0]}x{image.size[1]} and {size[1]}x{size[0]} in {self.name}"
            raise BadImageError(f"image {entry['id']}, {str(self._folder / entry['file_name'])!r}, {sizes}")
        if not self.annotated:
            return image, {"image_id": entry["id"], "original_size": size}
        objects = self._objects(entry)
        labels = [self.category_ids.index(one["category_id"]) for one, _ in objects]
        try:
            masks = decode([one["segmentation"] for one, _ in objects], *size)
        except (RuntimeError, TypeError, ValueError) as error:
            raise BadImageError(f"image {entry['id']} of {self.name} has a bad RLE: {error}") from error
        return image, target_of([box for _, box in objects], labels, masks, entry["id"], size)

    @property
    def ground_truth(self) -> dict[str, Any]:
        annotations = [entry for image in self.image_ids for entry in self._by_image[image]]
        return {"images": self._images, "annotations": annotations, "categories": self._categories}

    def part(self, indices: Sequence[int]) -> CocoImages:
        """Return some of the images as a data set."""
        other = copy.copy(self)
        other._choose(self._images[index] for index in indices)
        return other

    def spread(self, images: int | None) -> CocoImages:
        """Return so many of the images, evenly spread; None is all."""
        if images is None or images >= len(self):
            return self
        return self.part([index * len(self) // images for index in range(images)])

    def fingerprint(self) -> str:
        """Return a short hash of the annotations, and of the names and sizes of the image files."""
        text = json.dumps(self.ground_truth, sort_keys=True, default=str)
        files = "\n".join(f"{self._files.name(index)} {self._files.size(index)}" for index in range(len(self)))
        return hashlib.sha256(f"{text}\n{files}".encode()).hexdigest()[:16]


def _read(path: Path, folder: Path) -> dict[str, list[Entry]]:
    """Read a file and check its entries; annotations get the area, the box and iscrowd where a file leaves them out."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        categories = sorted(content["categories"], key=lambda entry: entry["id"])
        names = {entry["id"]: entry["name"] for entry in categories}
        images = {entry["id"]: entry for entry in content["images"]}
        missing = [entry["file_name"] for entry in images.values() if not (folder / entry["file_name"]).is_file()]
        problems = [f"{str(folder / name)!r} is missing" for name in missing]
        for entry in content["annotations"]:
            if problem := _problem(entry, images, names):
                problems.append(f"annotation {entry['id']} of image {entry['image_id']} {problem}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    if problems:
        raise ValueError(f"{str(path)!r}: {listed(problems)}")
    annotations = []
    for entry in content["annotations"]:
        entry = {**entry, "iscrowd": int(bool(entry.get("iscrowd", 0)))}
        if "bbox" not in entry or "area" not in entry:
            image = images[entry["image_id"]]
            entry = box_and_area(entry["segmentation"], image["height"], image["width"]) | entry
        annotations.append(entry)
    return {"categories": categories, "images": list(images.values()), "annotations": annotations}


def _problem(entry: Entry, images: Mapping[int, Entry], categories: Container[int]) -> str | None:
    """Return what is wrong with an annotation; None if nothing is."""
    if entry["image_id"] not in images or entry["category_id"] not in categories:
        return f"of category {entry['category_id']}: the file must list both"
    if "bbox" in entry and (len(entry["bbox"]) != 4 or not all(map(math.isfinite, entry["bbox"]))):
        return f"has the box {entry['bbox']}; accepted: x, y, width, height"
    segmentation, image = entry.get("segmentation"), images[entry["image_id"]]
    if isinstance(segmentation, list):
        fits = bool(segmentation) and all(
            len(polygon) >= 6 and len(polygon) % 2 == 0 and all(map(math.isfinite, polygon)) for polygon in segmentation
        )
    else:
        size = [image["height"], image["width"]]
        fits = isinstance(segmentation, dict) and "counts" in segmentation and segmentation.get("size") == size
    accepted = "polygons of three corners or more, or RLE of the image's size"
    return None if fits else f"has the segmentation {reprlib.repr(segmentation)}; accepted: {accepted}"


def _inside(box: Sequence[float], image: Entry) -> Box:
    """Return the part of a box (x, y, width, height) inside its image, as (left, top, right, bottom)."""
    right, bottom = min(box[0] + box[2], image["width"]), min(box[1] + box[3], image["height"])
    return max(box[0], 0.0), max(box[1], 0.0), right, bottom


def open_coco(where: Path, split: str = "train", *, with_objects: bool = False) -> CocoImages:
    """Open a data set of images with objects.

    Args:
        where: A folder in COCO's layout (annotations/instances_{split}2017.json and {split}2017/), a folder with
            instances_{split}2017.json, or instances.json for both splits, next to images/, or a JSON file.
        split: "train" or "val".
        with_objects: See `CocoImages`.
    """
    choice("split", split, SPLITS)
    if not where.exists():
        raise ValueError(f"data={str(where)!r} is neither a folder nor a JSON file")
    names = [f"annotations/instances_{split}2017.json", f"instances_{split}2017.json", "instances.json"]
    file = _first([where / name for name in names]) if where.is_dir() else where
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    folder = _first([root / file.stem.removeprefix("instances_"), root / "images"])
    return CocoImages(file, folder, with_objects=with_objects)


def _first(paths: Sequence[Path]) -> Path:
    if found := next((path for path in paths if path.exists()), None):
        return found
    raise ValueError(f"one of these is needed: {', '.join(map(repr, map(str, paths)))}")
