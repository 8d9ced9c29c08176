"""AP from its definition, slowly: what faster-coco-eval and the bootstrap are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]
SIZES = {"": (0, 1e10), "s": (0, 32**2), "m": (32**2, 96**2), "l": (96**2, 1e10)}

Entry = dict[str, Any]


def box_overlap(found: Entry, wanted: Entry) -> float:
    """Intersection over union; over the detection's own area if the object is a crowd."""
    (x, y, w, h), (a, b, c, d) = found["bbox"], wanted["bbox"]
    both = max(0.0, min(x + w, a + c) - max(x, a)) * max(0.0, min(y + h, b + d) - max(y, b))
    return both / (w * h if wanted["iscrowd"] else w * h + c * d - both)


def mask_overlap(found: Entry, wanted: Entry) -> float:
    both = int((found["mask"] & wanted["mask"]).sum())
    return both / int(found["mask"].sum() if wanted["iscrowd"] else (found["mask"] | wanted["mask"]).sum())


def box_area(entry: Entry) -> float:
    return float(entry["bbox"][2] * entry["bbox"][3])


def mask_area(entry: Entry) -> float:
    return float(entry["mask"].sum())


KINDS: dict[str, tuple[Callable[[Entry, Entry], float], Callable[[Entry], float]]] = {
    "bbox": (box_overlap, box_area),
    "segm": (mask_overlap, mask_area),
}


def twelve(images: Sequence[int], categories: Sequence[int], wanted: list[Entry], found: list[Entry], kind: str):
    """The twelve numbers by name, from 0 to 1, nan where there is nothing to find."""
    numbers: dict[str, float] = {}
    ap: dict[str, list[list[float]]] = {}
    for size, most in [("", 1), ("", 10), ("", 100), ("s", 100), ("m", 100), ("l", 100)]:
        precisions, recalls = [], []
        for category in categories:
            curves = [_curve(images, category, wanted, found, kind, t, SIZES[size], most) for t in THRESHOLDS]
            if None not in curves:
                precisions.append([_interpolated(hits) for hits, _ in curves])
                recalls.append([top for _, top in curves])
        if most == 100:
            ap[size] = precisions
        numbers[f"AR{size or most}"] = _mean(recalls)
    numbers["AP"] = _mean(ap[""])
    numbers["AP50"] = _mean([row[0] for row in ap[""]])
    numbers["AP75"] = _mean([row[5] for row in ap[""]])
    numbers |= {f"AP{size}": _mean(ap[size]) for size in "sml"}
    return numbers


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _curve(images, category, wanted, found, kind, threshold, limits, most):
    """Points (recall, precision) as detections come in by score, and the recall at the end."""
    overlap, area = KINDS[kind]
    outcomes: list[tuple[float, bool]] = []
    total = 0
    for image in images:
        objects = [o for o in wanted if o["image_id"] == image and o["category_id"] == category]
        skip = [o["iscrowd"] or not limits[0] <= o["area"] <= limits[1] for o in objects]
        total += skip.count(False)
        here = [d for d in found if d["image_id"] == image and d["category_id"] == category]
        taken: set[int] = set()
        for one in sorted(here, key=lambda d: -d["score"])[:most]:
            best, best_key = None, None
            for number, candidate in enumerate(objects):
                value = overlap(one, candidate)
                if (number in taken and not candidate["iscrowd"]) or value < threshold - 1e-12:
                    continue
                key = (not skip[number], value, number)  # objects that count come first, of equal ones the last
                if best_key is None or key > best_key:
                    best, best_key = number, key
            if best is None:
                if limits[0] <= area(one) <= limits[1]:
                    outcomes.append((one["score"], False))
            else:
                taken.add(best)
                if not skip[best]:
                    outcomes.append((one["score"], True))
    if total == 0:
        return None
    outcomes.sort(key=lambda outcome: -outcome[0])
    points, right = [], 0
    for seen, (_, hit) in enumerate(outcomes, start=1):
        right += hit
        points.append((right / total, right / seen))
    return points, right / total


def _interpolated(points: list[tuple[float, float]]) -> float:
    """The mean over 101 recalls of the best precision at that recall or a higher one."""
    levels = np.linspace(0, 1, 101)
    return float(np.mean([max((p for r, p in points if r >= level), default=0.0) for level in levels]))
