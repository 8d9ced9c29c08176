"""COCO instances: the 2017 layout, one JSON next to a folder of images, or any JSON with any folder."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import reprlib
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as rle

from agglo.checks import choice
from agglo.lab.data.image_files import BadImageError, Files, listed, require_file
from agglo.lab.tasks.detection.data.base import DetectionData, Target, box_and_area, target_of

Entry = dict[str, Any]

_SMALLEST = 1.0  # pixels: MMDetection trains on no object with a shorter side


class CocoImages(DetectionData):
    """Images of a COCO JSON file with their objects.

    Crowds are in the ground truth, where detections of them count as neither right nor wrong, and never in a target.
    Nor are objects with a side below one pixel: COCO's own train2017 has boxes without area. Images without objects
    stay, with empty targets, unless with_objects leaves them out.
    """

    def __init__(self, annotations: Path, images: Path, *, with_objects: bool = False) -> None:
        self._categories, entries, objects = _read(require_file(annotations), images)
        classes, category_ids = ([category[key] for category in self._categories] for key in ("name", "id"))
        super().__init__(annotations.name, str(annotations), classes, category_ids)
        self._folder = images
        self._by_image: dict[int, list[Entry]] = {entry["id"]: [] for entry in entries}
        for entry in objects:
            self._by_image[entry["image_id"]].append(entry)
        self._choose(entry for entry in entries if not with_objects or self._objects(entry))
        if not len(self):
            raise ValueError(f"{str(annotations)!r} has no image that can be used")

    def _choose(self, images: Iterable[Entry]) -> None:
        self._images = list(images)
        self.image_ids = [entry["id"] for entry in self._images]
        self._files = Files(self._folder, [entry["file_name"] for entry in self._images])

    def _objects(self, image: Entry) -> Sequence[tuple[Entry, Sequence[float]]]:
        """Return the annotations that an image is trained with, and the parts of their boxes inside it, xyxy."""
        found = []
        for entry in self._by_image[image["id"]]:
            x, y, width, height = entry["bbox"]
            box = (max(x, 0.0), max(y, 0.0), min(x + width, image["width"]), min(y + height, image["height"]))
            if not entry["iscrowd"] and min(box[2] - box[0], box[3] - box[1]) >= _SMALLEST:
                found.append((entry, box))
        return found

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
            masks = [rle.decode(rle.segmToRle(one["segmentation"], *image.size)) for one, _ in objects]
        except (RuntimeError, TypeError, ValueError) as error:
            raise BadImageError(f"image {entry['id']} of {self.name} has a bad RLE: {error}") from error
        stacked = np.array(masks, np.uint8).reshape(-1, *size)
        return image, target_of([box for _, box in objects], labels, stacked, entry["id"], size)

    @property
    def ground_truth(self) -> dict[str, Any]:
        annotations = [entry for image in self.image_ids for entry in self._by_image[image]]
        return {"images": self._images, "annotations": annotations, "categories": self._categories}

    def part(self, indices: Iterable[int]) -> CocoImages:
        """Return some of the images as a data set."""
        other = copy.copy(self)
        other._choose(self._images[index] for index in indices)
        return other

    def spread(self, images: int | None) -> CocoImages:
        """Return so many of the images, evenly spread; None is all."""
        if images is None or images >= len(self):
            return self
        return self.part(index * len(self) // images for index in range(images))

    def fingerprint(self) -> str:
        """Return a short hash of the annotations, and of the names and sizes of the image files."""
        text = json.dumps(self.ground_truth, sort_keys=True, default=str)
        files = "\n".join(f"{self._files.name(index)} {self._files.size(index)}" for index in range(len(self)))
        return hashlib.sha256(f"{text}\n{files}".encode()).hexdigest()[:16]


def _read(path: Path, folder: Path) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Read and check categories, images and annotations, which get iscrowd, box and area where a file has none."""
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
    for entry in content["annotations"]:
        entry["iscrowd"] = int(bool(entry.get("iscrowd")))
        if "bbox" not in entry or "area" not in entry:
            image = images[entry["image_id"]]
            entry.update(box_and_area(entry["segmentation"], image["height"], image["width"]) | entry)
    return categories, list(images.values()), content["annotations"]


def _problem(entry: Entry, images: Mapping[int, Entry], categories: Container[int]) -> str | None:
    """Return what is wrong with an annotation; None if nothing is."""
    if entry["image_id"] not in images or entry["category_id"] not in categories:
        return f"of category {entry['category_id']}: the file must list both"
    image, box = images[entry["image_id"]], entry.get("bbox", [0.0] * 4)
    segmentation: Any = entry.get("segmentation")
    if len(box) != 4 or not all(map(math.isfinite, box)):
        return f"has the box {box}; accepted: x, y, width, height"
    if isinstance(segmentation, dict):
        fits = "counts" in segmentation and segmentation.get("size") == [image["height"], image["width"]]
    else:
        fits = bool(segmentation) and all(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)
    accepted = "polygons of three corners or more, or RLE of the image's size"
    return None if fits else f"has the segmentation {reprlib.repr(segmentation)}; accepted: {accepted}"


def open_coco(where: Path, split: str = "train", *, with_objects: bool = False) -> CocoImages:
    """Open a data set of images with objects.

    Args:
        where: A folder in COCO's layout (annotations/instances_{split}2017.json and {split}2017/), a folder with
            instances_{split}2017.json, or instances.json for both splits, next to images/, or a JSON file.
        split: "train" or "val".
        with_objects: See `CocoImages`.
    """
    choice("split", split, ("train", "val"))
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
