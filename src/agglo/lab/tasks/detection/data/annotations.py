"""COCO JSON files, read and checked, and their masks: polygons, or run-length encodings (RLE), packed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.lab.data.image_files import require_file

Entry = dict[str, Any]
Mask = NDArray[np.uint8]


@dataclass
class Annotations:
    """The entries of a COCO file.

    Attributes:
        categories: In the order of their ids.
        images: Those with an id, a size and a file.
        annotations: Those of these images, each with a box inside its image, a mask, an area and iscrowd.
        bad: One sentence for every other entry.
    """

    categories: list[Entry]
    images: list[Entry] = field(default_factory=list)
    annotations: list[Entry] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def read_annotations(path: Path, image_problem: Callable[[str], str | None]) -> Annotations:
    """Read and check a file; `image_problem` says what is wrong with the image of a file name, None if it exists."""
    content = _parsed(require_file(path))
    found = Annotations(sorted(content["categories"], key=lambda entry: entry["id"]))
    by_id: dict[Any, Entry] = {}
    bad_images: set[Any] = set()
    for entry in content["images"]:
        problem = _image_problem(entry, by_id) or image_problem(entry["file_name"])
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
        ids = [entry["id"] for entry in content["categories"]]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"categories with ids {ids}; needed: one or more, each with another id")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no COCO instances file: {type(error).__name__} {error}") from error
    return dict(content)


def _id_problem(entry: Entry, known: Any) -> str | None:
    if not isinstance(entry.get("id"), int):
        return "has no number as id"
    return "is listed twice: two entries have this id" if entry["id"] in known else None


def _image_problem(entry: Entry, images: dict[Any, Entry]) -> str | None:
    if problem := _id_problem(entry, images):
        return problem
    if not isinstance(entry.get("file_name"), str):
        return "has no file name"
    for side in ("height", "width"):
        if not isinstance(entry.get(side), int) or entry[side] < 1:
            return f"has {side}={entry.get(side)!r}; accepted: whole numbers from 1"
    return None


def _annotation_problem(entry: Entry, images: dict[Any, Entry], category_ids: set[int], ids: set[Any]) -> str | None:
    if problem := _id_problem(entry, ids):
        return problem
    if entry.get("image_id") not in images:
        return "is of an image that the file does not list"
    if entry.get("category_id") not in category_ids:
        return f"is of category {entry.get('category_id')}, which the file does not list"
    image = images[entry["image_id"]]
    if "bbox" in entry and not _is_box(entry["bbox"], image):
        size = f"{image['width']}x{image['height']}"
        return f"has the box {entry['bbox']}; accepted: x, y, width, height of an area in its image of {size} pixels"
    return segmentation_problem(entry.get("segmentation", []), image["height"], image["width"])


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, (int, float)) and math.isfinite(each) for each in values)


def _is_box(box: Any, image: Entry) -> bool:
    if not _are_numbers(box) or len(box) != 4:
        return False
    x, y, width, height = box
    return width > 0 < height and -width < x < image["width"] and -height < y < image["height"]


def segmentation_problem(segmentation: Any, height: int, width: int) -> str | None:
    """Return what is wrong with a segmentation in an image of that size; None if nothing is."""
    if isinstance(segmentation, list):
        if not segmentation:
            return "has no mask: its segmentation is empty"
        for polygon in segmentation:
            if not _are_numbers(polygon) or len(polygon) < 6 or len(polygon) % 2:
                return f"has the polygon {_short(polygon)}; accepted: x and y of at least three corners"
        return None
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        return f"has the segmentation {_short(segmentation)}; accepted: polygons, or RLE with size and counts"
    if list(segmentation.get("size", ())) != [height, width]:
        return f"has an RLE of size {segmentation.get('size')} in an image of {[height, width]} (height, width)"
    try:
        inside = decoded([segmentation], height, width).any()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"has a bad RLE, counts={_short(segmentation['counts'])}: {error}"
    return None if inside else "has an RLE without any pixel"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _completed(entry: Entry, image: Entry) -> Entry:
    """Add the area, the box and iscrowd, which some files leave out."""
    entry = {**entry, "iscrowd": int(bool(entry.get("iscrowd", 0)))}
    if "bbox" not in entry or "area" not in entry:
        box, area = box_and_area(entry["segmentation"], image["height"], image["width"])
        entry.setdefault("bbox", box)
        entry.setdefault("area", area)
    return entry


def to_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return any segmentation as one packed RLE; polygons of one object are united."""
    from faster_coco_eval.core import mask as api

    if isinstance(segmentation, list):
        return dict(api.merge(api.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        return dict(api.frPyObjects(segmentation, height, width))
    return dict(segmentation)


def decoded(segmentations: Sequence[Any], height: int, width: int) -> Mask:
    """Return masks (n, height, width) of 0 and 1."""
    from faster_coco_eval.core import mask as api

    if not segmentations:
        return np.zeros((0, height, width), np.uint8)
    stacked = api.decode([to_rle(one, height, width) for one in segmentations])
    return np.ascontiguousarray(np.moveaxis(stacked, -1, 0))


def encoded(masks: NDArray[Any]) -> list[dict[str, Any]]:
    """Return masks (n, H, W), nonzero inside, as packed RLEs whose strings JSON can hold."""
    from faster_coco_eval.core import mask as api

    if not len(masks):
        return []
    found = api.encode(np.asfortranarray(np.moveaxis(masks != 0, 0, -1).astype(np.uint8)))
    return [{"size": list(map(int, rle["size"])), "counts": rle["counts"].decode("ascii")} for rle in found]


def box_and_area(segmentation: Any, height: int, width: int) -> tuple[list[float], float]:
    """Return the box (x, y, width, height) around a segmentation, and its number of pixels."""
    from faster_coco_eval.core import mask as api

    rle = to_rle(segmentation, height, width)
    return [float(value) for value in api.toBbox(rle)], float(api.area(rle))
