"""COCO instances: the 2017 layout, one JSON beside a folder of images, or any JSON with any folder.

data = open_coco(Path("coco"), "val")
image, target = data[0]
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agglo.detection.data.annotations import Entry, read_annotations
from agglo.detection.data.base import DetectionData, Target, target_of
from agglo.detection.data.masks import decoded
from agglo.experiments.image_files import BadImageError, Files, listed, unreadable

SPLITS = ("train", "val")
_SMALLEST = 1.0  # pixels: MMDetection trains on no object with a shorter side


class CocoImages(DetectionData):
    """Images of a COCO JSON file with their objects.

    Crowds are in the ground truth, where detections of them count as neither right nor wrong, and never in a target.
    Nor are objects with a side below one pixel. Images without objects stay, with empty targets.

    annotations: the JSON file. images: the folder that its file names are in.
    skip_bad: leave out what is bad, with a warning and a sentence each in `skipped`: images that are missing, cannot be
        decoded or have another size than the file says, annotations with a bad box, mask or id. Decodes every image to
        find them. Otherwise ValueError names the first few here, and BadImageError a bad image when it is asked for.
    with_objects: leave out images without a single object to train on; `remarks` counts them.
    """

    def __init__(self, annotations: Path, images: Path, *, skip_bad: bool = False, with_objects: bool = False) -> None:
        if not images.is_dir():
            raise ValueError(f"images={str(images)!r} is not a folder")

        def image_exists(name: str) -> str | None:
            return None if (images / name).is_file() else f"is missing: {str(images / name)!r}"

        found = read_annotations(annotations, image_exists)
        super().__init__(
            annotations.name,
            place=str(annotations),
            classes=[category["name"] for category in found.categories],
            category_ids=[category["id"] for category in found.categories],
        )
        self._categories, self.skipped = found.categories, found.bad
        if found.bad and not skip_bad:
            raise ValueError(f"{str(annotations)!r}: {listed(found.bad)}; --skip-bad goes on without")
        self._label = {category: label for label, category in enumerate(self.category_ids)}
        self._by_image: dict[int, list[Entry]] = {entry["id"]: [] for entry in found.images}
        for entry in found.annotations:
            self._by_image[entry["image_id"]].append(entry)
        self._folder = images
        self._choose(found.images)
        if skip_bad:
            self._choose(self._readable())
        if self.skipped:
            warnings.warn(f"{self.name}: {len(self.skipped)} skipped: {listed(self.skipped)}", stacklevel=2)
        if with_objects:
            self._leave_out_empty()
        self._remark()
        if not len(self):
            raise ValueError(f"{str(annotations)!r} has no image that can be used")

    def _choose(self, images: Iterable[Entry]) -> None:
        self._images = list(images)
        self.image_ids = [entry["id"] for entry in self._images]
        self._files = Files(self._folder, [entry["file_name"] for entry in self._images])

    def _readable(self) -> list[Entry]:
        complaints = unreadable(len(self), self.open)
        self.skipped += [text for text in complaints if text is not None]
        return [entry for entry, text in zip(self._images, complaints, strict=True) if text is None]

    def _leave_out_empty(self) -> None:
        chosen = [entry for entry in self._images if self._objects(entry)]
        if (without := len(self) - len(chosen)) > 0:
            self.remarks.append(f"{without} of {len(self)} images have no object to train on and are left out")
        self._choose(chosen)

    def _remark(self) -> None:
        entries = [entry for image in self.image_ids for entry in self._by_image[image]]
        crowds = sum(entry["iscrowd"] for entry in entries)
        objects = sum(len(self._objects(image)) for image in self._images)
        if crowds:
            self.remarks.append(f"{crowds} of {len(entries)} annotations are crowds: evaluated, never trained on")
        if (small := len(entries) - crowds - objects) > 0:
            self.remarks.append(f"{small} of {len(entries)} annotations have a side below 1 pixel: never trained on")

    def _objects(self, image: Entry) -> list[Entry]:
        """What an image is trained with."""
        return [
            entry
            for entry in self._by_image[image["id"]]
            if not entry["iscrowd"] and min(_inside(entry["bbox"], image)[2:]) >= _SMALLEST
        ]

    def open(self, index: int) -> Any:
        """The picture; BadImageError if it cannot be decoded or has not the size that the file says."""
        entry, image = self._images[index], self._files.open(index)
        if image.size != (entry["width"], entry["height"]):
            path, said = str(self._folder / entry["file_name"]), f"{entry['width']}x{entry['height']}"
            found = f"{image.size[0]}x{image.size[1]}"
            raise BadImageError(f"image {entry['id']}, {path!r}, is {found} and {said} in {self.name}")
        return image

    def read(self, index: int) -> tuple[Any, Target]:
        entry = self._images[index]
        size = (entry["height"], entry["width"])
        if not self.annotated:
            return self.open(index), {"image_id": entry["id"], "original_size": size}
        objects = self._objects(entry)
        boxes = [_corners(_inside(one["bbox"], entry)) for one in objects]
        labels = [self._label[one["category_id"]] for one in objects]
        masks = decoded([one["segmentation"] for one in objects], *size)
        return self.open(index), target_of(boxes, labels, masks, entry["id"], size)

    @property
    def ground_truth(self) -> dict[str, Any]:
        annotations = [entry for image in self.image_ids for entry in self._by_image[image]]
        return {"images": self._images, "annotations": annotations, "categories": self._categories}

    def part(self, indices: Sequence[int]) -> CocoImages:
        """Some of the images, as a data set of its own: a dozen to overfit, every fifth to evaluate on."""
        other = copy.copy(self)
        other._choose([self._images[index] for index in indices])
        return other

    def spread(self, images: int | None) -> CocoImages:
        """So many of the images, evenly spread; None is all."""
        if images is None or images >= len(self):
            return self
        return self.part([index * len(self) // images for index in range(images)])

    def file_name(self, index: int) -> str:
        """As the JSON file has it."""
        return self._files.name(index)

    def fingerprint(self) -> str:
        """Of the annotations, and of the names and sizes of the image files."""
        text = json.dumps(self.ground_truth, sort_keys=True, default=str)
        files = "\n".join(f"{self._files.name(index)} {self._files.size(index)}" for index in range(len(self)))
        return hashlib.sha256(f"{text}\n{files}".encode()).hexdigest()[:16]


def _inside(box: Sequence[float], image: Entry) -> tuple[float, float, float, float]:
    """The part of a box (x, y, width, height) inside its image."""
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[0] + box[2], image["width"]), min(box[1] + box[3], image["height"])
    return left, top, right - left, bottom - top


def _corners(box: Sequence[float]) -> list[float]:
    return [box[0], box[1], box[0] + box[2], box[1] + box[3]]


def open_coco(
    where: Path, split: str = "train", *, images: Path | None = None, skip_bad: bool = False, with_objects: bool = False
) -> CocoImages:
    """Images with objects, wherever they are.

    where: a folder in COCO's layout (annotations/instances_{split}2017.json and {split}2017/), a folder with
        instances*.json beside images/, or a JSON file.
    images: the folder of the pictures; None looks beside the JSON file.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not known; accepted: {', '.join(map(repr, SPLITS))}")
    if where.is_file():
        file, remark = where, None
    elif where.is_dir():
        file, remark = _instances(where, split)
    else:
        raise ValueError(f"data={str(where)!r} is neither a folder nor a JSON file")
    data = CocoImages(file, images or _folder_of(file), skip_bad=skip_bad, with_objects=with_objects)
    if remark is not None:
        data.remarks.append(remark)
    return data


def _instances(folder: Path, split: str) -> tuple[Path, str | None]:
    """The instances file of a split, and a remark if it is of no split in particular."""
    found = sorted(folder.glob("instances*.json")) + sorted((folder / "annotations").glob("instances*.json"))
    named = [path for path in found if split in path.stem]
    named = [path for path in named if path.stem == f"instances_{split}2017"] or named
    if len(named) == 1:
        return named[0], None
    unsplit = [path for path in found if not any(other in path.stem for other in SPLITS)]
    if not named and len(unsplit) == 1:
        return unsplit[0], f"{unsplit[0].name} names no split: train and val are the same images"
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
    wanted = f"one instances*.json of split {split!r}, here or in annotations/"
    raise ValueError(f"{str(folder)!r} must have {wanted}; found: {names}. A JSON file can be given itself")


def _folder_of(file: Path) -> Path:
    stem = file.stem.removeprefix("instances_")
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    tried = [root / stem, root / "images", root / "images" / stem]
    for folder in tried:
        if folder.is_dir():
            return folder
    raise ValueError(f"no folder of images for {str(file)!r}; tried {', '.join(map(repr, map(str, tried)))}")
