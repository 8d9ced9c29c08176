"""Masks as COCO files hold them: polygons, run lengths, run lengths packed into a string.

Runs go down the columns of a mask, one after the other, and alternate between outside and inside, beginning outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint8]

_FIRST, _BITS, _MORE, _SIGN = 48, 5, 32, 16  # of a packed character: "0", payload, whether more follow, sign


def complaint(segmentation: Any, height: int, width: int) -> str | None:
    """What is wrong with a segmentation of an image of that size; None if nothing is."""
    if isinstance(segmentation, list):
        return _polygon_complaint(segmentation)
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        return f"has the segmentation {_short(segmentation)}; accepted: polygons, or RLE with size and counts"
    if list(segmentation.get("size", ())) != [height, width]:
        return f"has an RLE of size {segmentation.get('size')} in an image of {[height, width]} (height, width)"
    try:
        counts = run_lengths(segmentation["counts"])
    except ValueError as error:
        return f"has a bad RLE: {error}"
    if sum(counts) != height * width:
        return f"has a bad RLE: its runs are {sum(counts)} pixels together, the image has {height * width}"
    return None if sum(counts[1::2]) else "has an RLE without any pixel"


def _polygon_complaint(polygons: list[Any]) -> str | None:
    if not polygons:
        return "has no mask: its segmentation is empty"
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return f"has the polygon {_short(polygon)}; accepted: x and y of at least three corners"
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in polygon):
            return f"has a polygon with a coordinate that is no number: {_short(polygon)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def run_lengths(counts: Any) -> list[int]:
    """Runs of an RLE, packed or not; ValueError says what is wrong with it.

    Packed: every run in groups of 5 bits, lowest first, two's complement; from the fourth run on it is the difference
    to the run two before.

    >>> run_lengths("02203ONOb0")
    [0, 2, 2, 2, 5, 1, 3, 0, 53]
    """
    if isinstance(counts, (bytes, str)):
        return _unpacked(counts if isinstance(counts, bytes) else counts.encode("latin1", "replace"))
    if not isinstance(counts, list):
        raise ValueError(f"counts={_short(counts)} are neither a list nor a string")
    for count in counts:
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"the run {count!r} is no number of pixels")
    return counts


def _unpacked(packed: bytes) -> list[int]:
    runs: list[int] = []
    value = shift = 0
    for character in packed:
        bits = character - _FIRST
        if not 0 <= bits < 64:
            raise ValueError(f"the character {chr(character)!r} occurs in no packed string")
        value |= (bits & (_MORE - 1)) << shift
        shift += _BITS
        if bits & _MORE:
            continue
        if bits & _SIGN:
            value -= 1 << shift
        if len(runs) > 2:
            value += runs[-2]
        if value < 0:
            raise ValueError(f"run {len(runs)} has {value} pixels")
        runs.append(value)
        value = shift = 0
    if shift:
        raise ValueError("the string ends inside a run")
    return runs


def to_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Any segmentation as one packed RLE. Polygons of one object are united."""
    from faster_coco_eval.core import mask as api

    if isinstance(segmentation, list):
        return dict(api.merge(api.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        return dict(api.frPyObjects(segmentation, height, width))
    return dict(segmentation)


def decoded(segmentations: Sequence[Any], height: int, width: int) -> Mask:
    """Masks (n, height, width) of 0 and 1."""
    from faster_coco_eval.core import mask as api

    if not segmentations:
        return np.zeros((0, height, width), np.uint8)
    stacked = api.decode([to_rle(one, height, width) for one in segmentations])
    return np.ascontiguousarray(np.moveaxis(stacked, -1, 0))


def encoded(masks: NDArray[Any]) -> list[dict[str, Any]]:
    """Masks (n, H, W), anything but 0 is inside, as packed RLEs whose strings JSON can hold."""
    from faster_coco_eval.core import mask as api

    if not len(masks):
        return []
    found = api.encode(np.asfortranarray(np.moveaxis(masks != 0, 0, -1).astype(np.uint8)))
    return [{"size": list(map(int, rle["size"])), "counts": _text(rle["counts"])} for rle in found]


def _text(counts: bytes | str) -> str:
    return counts.decode("ascii") if isinstance(counts, bytes) else counts


def box_and_area(segmentation: Any, height: int, width: int) -> tuple[list[float], float]:
    """The box (x, y, width, height) around a segmentation, and its number of pixels."""
    from faster_coco_eval.core import mask as api

    rle = to_rle(segmentation, height, width)
    return [float(value) for value in api.toBbox(rle)], float(api.area(rle))
