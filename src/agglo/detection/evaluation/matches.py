"""AP again and again on resampled images: which detection matched which object is decided once per image.

    dense, reduced = (match(data.ground_truth, results, "segm") for results in (dense_results, reduced_results))
    samples = bootstrap({"dense": dense, "reduced": reduced}, resamples=1000)
    interval(samples["reduced"]["AP"] - samples["dense"]["AP"])

COCO matches the detections of every image on its own, and only then sorts all of them by score. So an image that is
drawn three times counts three times, and nothing has to be matched again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.detection.data.masks import to_rle
from agglo.detection.evaluation.average_precision import KINDS, require_known
from agglo.experiments.files import replacing
from agglo.experiments.randomness import derived_seed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
NUMBERS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}  # thresholds that each is the mean of
_MOST = 100  # detections that count, per image and category


@dataclass(frozen=True)
class _Category:
    """All detections of one category, best first.

    image: (D,), by number. right, counts: (T, D), at each threshold; what matches a crowd does not count.
    objects: (I,), to be found in each image.
    run: (D,), one number for detections of one image with the same score; None if every one is alone.
    """

    image: Ints
    right: Bools
    counts: Bools
    objects: Ints
    run: Ints | None

    def precision(self, weights: Ints) -> Floats | None:
        """The mean over recalls of the precision at each threshold (T,); None if there is nothing to find."""
        total = int(self.objects @ weights)
        if total == 0:
            return None
        weight, right, counts = weights[self.image], self.right, self.counts
        if self.run is not None:
            copies = _copies(self.run, weight)
            weight, right, counts = np.ones(len(copies), np.int64), right[:, copies], counts[:, copies]
        same = bool((counts == counts[:1]).all())
        found = np.zeros(len(THRESHOLDS))
        for number in range(len(THRESHOLDS)):
            if number == 0 or not same:
                seen = np.cumsum(weight * counts[number])
            # The best precision at a recall is reached where something is right, and by the last of its copies.
            at = np.flatnonzero(right[number])
            hits = np.cumsum(weight[at])
            curve = hits / np.maximum(seen[at], 1)
            curve = np.maximum.accumulate(curve[::-1])[::-1]
            reached = np.searchsorted(hits / total, RECALLS, side="left")
            found[number] = curve[reached[reached < len(curve)]].sum() / len(RECALLS)
        return found


def _copies(run: Ints, weight: Ints) -> Ints:
    """Every detection as often as its weight says. Copies of an image that gives one score several times follow each
    other as a whole: a b a b, where single detections would be a a b b."""
    chosen = np.repeat(np.arange(len(run)), weight)
    copy = np.arange(len(chosen)) - np.repeat(np.cumsum(weight) - weight, weight)
    return chosen[np.lexsort((chosen, copy, run[chosen]))]


@dataclass(frozen=True)
class Matches:
    """The detections of one system on some images."""

    image_ids: tuple[int, ...]
    categories: Mapping[int, _Category]

    def average_precision(self, weights: Ints | None = None) -> dict[str, float]:
        """AP, AP50 and AP75, as `average_precision` gives them. weights: how often each image counts; None is once."""
        if weights is None:
            weights = np.ones(len(self.image_ids), np.int64)
        found = [category.precision(weights) for category in self.categories.values()]
        present = np.array([values for values in found if values is not None])
        if not len(present):
            return dict.fromkeys(NUMBERS, math.nan)
        return {name: float(present[:, chosen].mean()) for name, chosen in NUMBERS.items()}

    def save(self, path: Path) -> None:
        """As .npz, for `load`: all that resampling needs, in some bytes per detection, without boxes and masks."""
        arrays: dict[str, Any] = {"image_ids": np.array(self.image_ids), "categories": np.array(list(self.categories))}
        for number, category in self.categories.items():
            arrays[f"{number}.image"] = category.image.astype(np.int32)
            arrays[f"{number}.objects"] = category.objects.astype(np.int32)
            arrays[f"{number}.right"] = np.packbits(category.right, axis=1)
            arrays[f"{number}.counts"] = np.packbits(category.counts, axis=1)
            if category.run is not None:
                arrays[f"{number}.run"] = category.run.astype(np.int32)
        with replacing(path) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Matches:
        """What `save` wrote."""
        with np.load(path) as arrays:
            categories = {}
            for number in arrays["categories"].tolist():
                image = arrays[f"{number}.image"].astype(np.int64)
                right, counts = (
                    np.unpackbits(arrays[f"{number}.{name}"], axis=1, count=len(image)).astype(np.bool_)
                    for name in ("right", "counts")
                )
                run = arrays[f"{number}.run"].astype(np.int64) if f"{number}.run" in arrays else None
                categories[number] = _Category(image, right, counts, arrays[f"{number}.objects"].astype(np.int64), run)
            return cls(tuple(arrays["image_ids"].tolist()), categories)


def match(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str = "segm", area: str = "all"
) -> Matches:
    """Match the detections of every image, as COCO does.

    kind: "bbox" or "segm". area: "all", or objects that are "small", "medium" or "large".
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(map(repr, KINDS))}")
    if area not in AREAS:
        raise ValueError(f"area={area!r} is not known; accepted: {', '.join(map(repr, AREAS))}")
    require_known(ground_truth, detections)
    sizes = {entry["id"]: (entry["height"], entry["width"]) for entry in ground_truth["images"]}
    image_ids = tuple(sorted(sizes))
    objects, found = _by_place(ground_truth["annotations"]), _by_place(detections)
    categories = {}
    for category in sorted(entry["id"] for entry in ground_truth["categories"]):
        parts = []
        n_objects = np.zeros(len(image_ids), np.int64)
        for number, image in enumerate(image_ids):
            here, there = objects.get((image, category), []), found.get((image, category), [])
            ignored = np.array([_ignored(entry, AREAS[area]) for entry in here], np.bool_)
            n_objects[number] = np.count_nonzero(~ignored)
            if there:
                there = sorted(there, key=lambda entry: -entry["score"])[:_MOST]
                right, counts = _matched(here, ignored, there, kind, AREAS[area], sizes[image])
                parts.append((np.full(len(there), number), [entry["score"] for entry in there], right, counts))
        categories[category] = _joined(parts, n_objects)
    return Matches(image_ids, categories)


def _by_place(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    found = defaultdict(list)
    for entry in entries:
        found[entry["image_id"], entry["category_id"]].append(entry)
    return dict(found)


def _ignored(entry: Mapping[str, Any], limits: tuple[float, float]) -> bool:
    return bool(entry.get("iscrowd", 0)) or not limits[0] <= entry["area"] <= limits[1]


def _joined(parts: list[tuple[Any, Any, Any, Any]], n_objects: Ints) -> _Category:
    if not parts:
        none = np.zeros((len(THRESHOLDS), 0), np.bool_)
        return _Category(np.zeros(0, np.int64), none, none, n_objects, None)
    image, score, right, counts = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    order = np.argsort(-score, kind="stable")
    image, score = image[order], score[order]
    alone = (np.diff(image) != 0) | (np.diff(score) != 0)
    run = None if alone.all() else np.concatenate([[0], np.cumsum(alone)])
    return _Category(image, right[:, order], counts[:, order], n_objects, run)


def _matched(
    objects: Sequence[Mapping[str, Any]],
    ignored: Bools,
    detections: Sequence[Mapping[str, Any]],
    kind: str,
    limits: tuple[float, float],
    size: tuple[int, int],
) -> tuple[Bools, Bools]:
    """Of each detection of one image and category, best first, at each threshold: is it right, does it count. (T, D)"""
    overlaps, areas = _overlaps(objects, detections, kind, size)
    crowd = np.array([bool(entry.get("iscrowd", 0)) for entry in objects], np.bool_)
    free = np.ones((len(THRESHOLDS), len(objects)), np.bool_)
    right = np.zeros((len(THRESHOLDS), len(detections)), np.bool_)
    # A detection that matches nothing counts if its own size is asked about.
    counts = np.repeat(((areas >= limits[0]) & (areas <= limits[1]))[None], len(THRESHOLDS), axis=0)
    for number, overlap in enumerate(overlaps):
        if not len(objects) or overlap.max() < THRESHOLDS[0]:
            continue
        possible = (free | crowd) & (overlap >= np.minimum(THRESHOLDS, 1 - 1e-10)[:, None])
        for level in np.flatnonzero(possible.any(1)):
            wanted = possible[level] & ~ignored
            candidates = np.flatnonzero(wanted if wanted.any() else possible[level])
            best = candidates[::-1][np.argmax(overlap[candidates[::-1]])]  # of equal ones the last, as in COCO's tool
            free[level, best] = False
            right[level, number] = counts[level, number] = not ignored[best]
    return right, counts


def _overlaps(
    objects: Sequence[Mapping[str, Any]], detections: Sequence[Mapping[str, Any]], kind: str, size: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Intersection over union (D, G), over the detection alone for a crowd; and the area of each detection."""
    from faster_coco_eval.core import mask as api

    crowd = [int(entry.get("iscrowd", 0)) for entry in objects]
    here, there = ([_region(entry, kind, size) for entry in some] for some in (objects, detections))
    areas = np.array([width * height for _, _, width, height in there]) if kind == "bbox" else api.area(there)
    areas = np.asarray(areas, np.float64)
    if not objects:
        return np.zeros((len(detections), 0)), areas
    return np.asarray(api.iou(there, here, crowd), np.float64).reshape(len(detections), len(objects)), areas


def _region(entry: Mapping[str, Any], kind: str, size: tuple[int, int]) -> Any:
    return list(map(float, entry["bbox"])) if kind == "bbox" else to_rle(entry["segmentation"], *size)


def bootstrap(systems: Mapping[str, Matches], *, resamples: int = 1000, seed: int = 0) -> dict[str, dict[str, Floats]]:
    """By system: AP, AP50 and AP75 of every resample (resamples,). The r-th resample has the same images for all of
    them, so that differences are of pairs."""
    images = {system.image_ids for system in systems.values()}
    if len(images) != 1:
        raise ValueError(f"systems must be judged on the same images, got {len(images)} different sets of them")
    [ids] = images
    draws = np.random.default_rng(derived_seed(seed, "bootstrap"))
    weights = [np.bincount(draws.integers(len(ids), size=len(ids)), minlength=len(ids)) for _ in range(resamples)]
    samples = {}
    for name, system in systems.items():
        found = [system.average_precision(some) for some in weights]
        samples[name] = {number: np.array([one[number] for one in found]) for number in NUMBERS}
    return samples


def interval(samples: Floats, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of the samples; nan are left out, where a resample has nothing to find."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie in (0, 1)")
    low, high = np.nanquantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
