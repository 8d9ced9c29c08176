"""Masks as COCO files have them: polygons, or run-length encodings (RLE), packed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint8]


def to_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return any segmentation as one packed RLE; polygons of one object are united."""
    from faster_coco_eval.core import mask as api

    if isinstance(segmentation, list):
        return dict(api.merge(api.frPyObjects(segmentation, height, width)))
    packed = not isinstance(segmentation["counts"], list)
    return dict(segmentation if packed else api.frPyObjects(segmentation, height, width))


def decode(segmentations: Sequence[Any], height: int, width: int) -> Mask:
    """Return masks (n, height, width) of 0 and 1."""
    from faster_coco_eval.core import mask as api

    if not segmentations:
        return np.zeros((0, height, width), np.uint8)
    stacked = api.decode([to_rle(one, height, width) for one in segmentations])
    return np.ascontiguousarray(np.moveaxis(stacked, -1, 0))


def encode(masks: NDArray[Any]) -> list[dict[str, Any]]:
    """Return masks (n, H, W), nonzero inside, as packed RLEs whose strings JSON can hold."""
    from faster_coco_eval.core import mask as api

    if not len(masks):
        return []
    found = api.encode(np.asfortranarray(np.moveaxis(masks != 0, 0, -1).astype(np.uint8)))
    return [{"size": list(map(int, rle["size"])), "counts": rle["counts"].decode("ascii")} for rle in found]


def box_and_area(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return the box (x, y, width, height) around a segmentation, and its number of pixels, by COCO's names."""
    from faster_coco_eval.core import mask as api

    rle = to_rle(segmentation, height, width)
    return {"bbox": [float(value) for value in api.toBbox(rle)], "area": float(api.area(rle))}
