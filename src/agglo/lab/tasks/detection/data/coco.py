"""COCO instances: the 2017 layout, one JSON next to a folder of images, or any JSON with any folder.

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

from agglo.checks import choice
from agglo.lab.data.image_files import BadImageError, Files, listed, unreadable
from agglo.lab.tasks.detection.data.annotations import Entry, decoded, read_annotations
from agglo.lab.tasks.detection.data.base import DetectionData, Target, target_of

SPLITS = ("train", "val")
_SMALLEST = 1.0  # pixels: MMDetection trains on no object with a shorter side


class CocoImages(DetectionData):
    """Images of a COCO JSON file with their objects.

    Crowds are in the ground truth, where detections of them count as neither right nor wrong, and never in a target.
    Nor are objects with a side below one pixel. Images without objects stay, with empty targets.

    Args:
        annotations: The JSON file.
        images: The folder that its file names are in.
        skip_bad: Leave out bad images and annotations, with a warning and a sentence each in `skipped`; decodes every
            image to find them. Otherwise ValueError names the first few, and BadImageError an image that cannot be
            decoded, or has another size than the file says, when it is asked for.
        with_objects: Leave out images without a single object to train on; `remarks` counts them.
    """

    def __init__(self, annotations: Path, images: Path, *, skip_bad: bool = False, with_objects: bool = False) -> None:
        if not images.is_dir():
            raise ValueError(f"images={str(images)!r} is not a folder")

        def problem(name: str) -> str | None:
            return None if (images / name).is_file() else f"is missing: {str(images / name)!r}"

        found = read_annotations(annotations, problem)
        super().__init__(
            annotations.name,
            place=str(annotations),
            classes=[category["name"] for category in found.categories],
            category_ids=[category["id"] for category in found.categories],
        )
        self._categories, self.skipped, self._folder = found.categories, found.bad, images
        if found.bad and not skip_bad:
            raise ValueError(f"{str(annotations)!r}: {listed(found.bad)}; --skip-bad goes on without")
        self._by_image: dict[int, list[Entry]] = {entry["id"]: [] for entry in found.images}
        for entry in found.annotations:
            self._by_image[entry["image_id"]].append(entry)
        self._choose(found.images)
        if skip_bad:
            complaints = unreadable(len(self), self.open)
            self.skipped += [text for text in complaints if text is not None]
            self._choose(entry for entry, text in zip(self._images, complaints, strict=True) if text is None)
        if self.skipped:
            warnings.warn(f"{self.name}: {len(self.skipped)} skipped: {listed(self.skipped)}", stacklevel=2)
        if with_objects:
            count = len(self)
            self._choose([entry for entry in self._images if self._objects(entry)])
            self._remark(count - len(self), f"of {count} images have no object to train on and are left out")
        entries = self.ground_truth["annotations"]
        crowds = sum(entry["iscrowd"] for entry in entries)
        small = len(entries) - crowds - sum(len(self._objects(image)) for image in self._images)
        self._remark(crowds, f"of {len(entries)} annotations are crowds: evaluated, never trained on")
        self._remark(small, f"of {len(entries)} annotations have a side below 1 pixel: never trained on")
        if not len(self):
            raise ValueError(f"{str(annotations)!r} has no image that can be used")

    def _choose(self, images: Iterable[Entry]) -> None:
        self._images = list(images)
        self.image_ids = [entry["id"] for entry in self._images]
        self._files = Files(self._folder, [entry["file_name"] for entry in self._images])

    def _remark(self, count: int, text: str) -> None:
        if count:
            self.remarks.append(f"{count} {text}")

    def _objects(self, image: Entry) -> list[Entry]:
        """Return the annotations that an image is trained with."""
        return [
            entry
            for entry in self._by_image[image["id"]]
            if not entry["iscrowd"] and min(_inside(entry["bbox"], image)[2:]) >= _SMALLEST
        ]

    def open(self, index: int) -> Any:
        """Return the PIL image; BadImageError if it cannot be decoded or has not the size that the file says."""
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
        inside = [_inside(one["bbox"], entry) for one in objects]
        boxes = [(x, y, x + width, y + height) for x, y, width, height in inside]
        labels = [self.category_ids.index(one["category_id"]) for one in objects]
        masks = decoded([one["segmentation"] for one in objects], *size)
        return self.open(index), target_of(boxes, labels, masks, entry["id"], size)

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


def _inside(box: Sequence[float], image: Entry) -> tuple[float, float, float, float]:
    """Return the part of a box (x, y, width, height) inside its image."""
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[0] + box[2], image["width"]), min(box[1] + box[3], image["height"])
    return left, top, right - left, bottom - top


def open_coco(
    where: Path, split: str = "train", *, images: Path | None = None, skip_bad: bool = False, with_objects: bool = False
) -> CocoImages:
    """Open a data set of images with objects.

    Args:
        where: A folder in COCO's layout (annotations/instances_{split}2017.json and {split}2017/), a folder with
            instances*.json and images/, or a JSON file.
        split: "train" or "val".
        images: The folder of the images; None looks next to the JSON file.
        skip_bad: See `CocoImages`, as for `with_objects`.
    """
    choice("split", split, SPLITS)
    if not where.exists():
        raise ValueError(f"data={str(where)!r} is neither a folder nor a JSON file")
    file = where if where.is_file() else _instances(where, split)
    data = CocoImages(file, images or _folder_of(file), skip_bad=skip_bad, with_objects=with_objects)
    if file != where and split not in file.stem:
        data.remarks.append(f"{file.name} names no split: train and val are the same images")
    return data


def _instances(folder: Path, split: str) -> Path:
    """Return the instances file of a split, or the only one that is of no split in particular."""
    found = sorted(folder.glob("instances*.json")) + sorted((folder / "annotations").glob("instances*.json"))
    named = [path for path in found if split in path.stem]
    named = [path for path in named if path.stem == f"instances_{split}2017"] or named
    named = named or [path for path in found if not any(other in path.stem for other in SPLITS)]
    if len(named) == 1:
        return named[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
    wanted = f"one instances*.json of split {split!r}, here or in annotations/"
    raise ValueError(f"{str(folder)!r} must have {wanted}; found: {names}. A JSON file can be given itself")


def _folder_of(file: Path) -> Path:
    stem = file.stem.removeprefix("instances_")
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    tried = [root / stem, root / "images", root / "images" / stem]
    if folder := next((each for each in tried if each.is_dir()), None):
        return folder
    raise ValueError(f"no folder of images for {str(file)!r}; tried {', '.join(map(repr, map(str, tried)))}")
