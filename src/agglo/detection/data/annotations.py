"""A COCO JSON file, read and checked: what can be used, and what is wrong with the rest, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agglo.detection.data.masks import box_and_area, complaint
from agglo.experiments.image_files import require_file

Entry = dict[str, Any]


@dataclass
class Annotations:
    """images: with an id, a file name and a size; annotations: each with a box inside its image, a mask, an area and
    iscrowd. bad: everything else, one sentence each."""

    path: Path
    categories: list[Entry]
    images: list[Entry]
    annotations: list[Entry]
    bad: list[str] = field(default_factory=list)


def read_annotations(path: Path, image_exists: Callable[[str], str | None]) -> Annotations:
    """Read and check a file.

    image_exists: given a file name, what is wrong with that image; None if it is there.
    """
    content = _parsed(require_file(path))
    found = Annotations(path, sorted(content["categories"], key=lambda entry: entry["id"]), [], [])
    _require_unique([entry["id"] for entry in found.categories], f"{path.name} has two categories with id")
    by_id: dict[Any, Entry] = {}
    bad_images: set[Any] = set()
    for entry in content["images"]:
        problem = _image_problem(entry, image_exists)
        if entry.get("id") in by_id:
            problem = "is listed twice: two images have this id"
        if problem is None:
            by_id[entry["id"]] = entry
            found.images.append(entry)
        else:
            bad_images.add(entry.get("id"))
            found.bad.append(f"image {entry.get('id')} of {path.name} {problem}")
    bad_images -= by_id.keys()
    category_ids = {entry["id"] for entry in found.categories}
    ids: set[Any] = set()
    for entry in content["annotations"]:
        if entry.get("image_id") in bad_images:
            continue  # goes with its image, which is counted
        problem = _annotation_problem(entry, by_id, category_ids, ids)
        if problem is None:
            ids.add(entry["id"])
            found.annotations.append(_completed(entry, by_id[entry["image_id"]]))
        else:
            where = f"annotation {entry.get('id')} of image {entry.get('image_id')} in {path.name}"
            found.bad.append(f"{where} {problem}")
    return found


def _parsed(path: Path) -> dict[str, list[Entry]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in ("images", "annotations", "categories"):
            if not isinstance(content[key], list) or not all(isinstance(entry, dict) for entry in content[key]):
                raise TypeError(f"{key!r} is no list of objects")
        for category in content["categories"]:
            if not isinstance(category["id"], int) or not isinstance(category["name"], str):
                raise TypeError(f"the category {category} lacks a number as id or a name")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    if not content["categories"]:
        raise ValueError(f"{str(path)!r} lists no categories")
    return dict(content)


def _require_unique(ids: list[Any], message: str) -> None:
    seen: set[Any] = set()
    for one in ids:
        if one in seen:
            raise ValueError(f"{message} {one}")
        seen.add(one)


def _image_problem(entry: Entry, image_exists: Callable[[str], str | None]) -> str | None:
    if not isinstance(entry.get("id"), int):
        return "has no number as id"
    if not isinstance(entry.get("file_name"), str):
        return "has no file name"
    for side in ("height", "width"):
        if not isinstance(entry.get(side), int) or entry[side] < 1:
            return f"has {side}={entry.get(side)!r}; accepted: whole numbers from 1"
    return image_exists(entry["file_name"])


def _annotation_problem(entry: Entry, images: dict[Any, Entry], category_ids: set[int], ids: set[Any]) -> str | None:
    if not isinstance(entry.get("id"), int):
        return "has no number as id"
    if entry["id"] in ids:
        return "is listed twice: two annotations have this id"
    if entry.get("image_id") not in images:
        return "is of an image that the file does not list"
    if entry.get("category_id") not in category_ids:
        return f"is of category {entry.get('category_id')}, which the file does not list"
    image = images[entry["image_id"]]
    if "bbox" in entry and (problem := _box_problem(entry["bbox"], image)) is not None:
        return problem
    return complaint(entry.get("segmentation", []), image["height"], image["width"])


def _box_problem(box: Any, image: Entry) -> str | None:
    if not isinstance(box, list) or len(box) != 4:
        return f"has the box {box}; accepted: x, y, width and height"
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in box):
        return f"has a box with something that is no number: {box}"
    x, y, width, height = box
    if width <= 0 or height <= 0:
        return f"has a box without area: x, y, width, height = {box}"
    if x >= image["width"] or y >= image["height"] or x + width <= 0 or y + height <= 0:
        return f"has a box outside its image of {image['width']}x{image['height']}: x, y, width, height = {box}"
    return None


def _completed(entry: Entry, image: Entry) -> Entry:
    """With the area, the box and iscrowd that some files leave out."""
    entry = {**entry, "iscrowd": int(bool(entry.get("iscrowd", 0)))}
    if "bbox" not in entry or "area" not in entry:
        box, area = box_and_area(entry["segmentation"], image["height"], image["width"])
        entry.setdefault("bbox", box)
        entry.setdefault("area", area)
    return entry
