"""AP again and again on resampled images: detections are matched with objects once per image.

    dense, reduced = (match(data.ground_truth, results, "segm") for results in (dense_results, reduced_results))
    samples = bootstrap({"dense": dense, "reduced": reduced}, resamples=1000)
    interval(samples["reduced"]["AP"] - samples["dense"]["AP"])

COCO matches the detections of every image on its own, and only then sorts all of them by score. So an image that is
drawn three times counts three times without matching again. faster-coco-eval matches; its accumulation, which takes
copies and no weights, would need ten times as long for each resample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agglo.lab.tasks.detection.evaluation.average_precision import coco_evaluation
from agglo.utils.files import replacing
from agglo.utils.randomness import derived_seed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

THRESHOLDS = 10  # of IoU, from 0.5 to 0.95
RECALLS = np.linspace(0.0, 1.0, 101)
NUMBERS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}  # thresholds that each is the mean of


class _Category(NamedTuple):
    """All detections of one category, best first."""

    image: Ints  # (D,), the index of each detection's image
    right: Bools  # (T, D), whether it matches an object, at each threshold
    counts: Bools  # (T, D), whether it counts at all: not if it matches a crowd
    objects: Ints  # (I,), the number of objects to be found in each image
    run: Ints  # (D,), one number for consecutive detections of one image with the same score

    def precision(self, weights: Ints) -> Floats | None:
        """Return the mean over recalls of the precision at each threshold (T,); None if there is no object."""
        total = int(self.objects @ weights)
        if total == 0:
            return None
        copies = _copies(self.run, weights[self.image])
        right, counts = self.right[:, copies], self.counts[:, copies]
        found = np.zeros(THRESHOLDS)
        for number in range(THRESHOLDS):
            at = np.flatnonzero(right[number])  # where the best precision at a recall is reached
            hits, seen = np.arange(1, len(at) + 1), np.cumsum(counts[number])[at]
            curve = np.maximum.accumulate((hits / np.maximum(seen, 1))[::-1])[::-1]
            reached = np.searchsorted(hits / total, RECALLS, side="left")
            found[number] = curve[reached[reached < len(curve)]].sum() / len(RECALLS)
        return found


def _copies(run: Ints, weight: Ints) -> Ints:
    """Return the index of every detection as often as its weight says.

    Copies of an image with several detections of one score follow each other as a whole: a b a b, not a a b b.
    """
    chosen = np.repeat(np.arange(len(run)), weight)
    copy = np.arange(len(chosen)) - np.repeat(np.cumsum(weight) - weight, weight)
    return chosen[np.lexsort((chosen, copy, run[chosen]))]


@dataclass(frozen=True)
class Matches:
    """The matched detections of one detector on some images."""

    image_ids: tuple[int, ...]
    categories: Mapping[int, _Category]

    def average_precision(self, weights: Ints | None = None) -> dict[str, float]:
        """Return AP, AP50 and AP75, as `average_precision` gives them; weights (I,) say how often an image counts."""
        weights = np.ones(len(self.image_ids), np.int64) if weights is None else weights
        found = [category.precision(weights) for category in self.categories.values()]
        present = np.array([values for values in found if values is not None])
        return {
            name: float(present[:, chosen].mean()) if len(present) else math.nan for name, chosen in NUMBERS.items()
        }

    def save(self, path: Path) -> None:
        """Write all that resampling needs to an .npz file, without scores, boxes and masks."""
        arrays: dict[str, Any] = {"image_ids": np.array(self.image_ids), "categories": np.array(list(self.categories))}
        for number, category in self.categories.items():
            arrays |= {f"{number}.{name}": values for name, values in category._asdict().items()}
        with replacing(path) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Matches:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            categories = {
                number: _Category(*(arrays[f"{number}.{name}"] for name in _Category._fields))
                for number in arrays["categories"].tolist()
            }
            return cls(tuple(arrays["image_ids"].tolist()), categories)


def match(ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str = "segm") -> Matches:
    """Match the detections of every image with its objects. kind: "bbox" or "segm"."""
    evaluation = coco_evaluation(ground_truth, detections, kind, separate_eval=True)
    image_ids, categories = (sorted(entry["id"] for entry in ground_truth[key]) for key in ("images", "categories"))
    count = len(image_ids)
    parts: list[tuple[list[Any], ...]] = [([], [], [], [])] * (count * len(categories))
    if evaluation is not None:
        params = evaluation.params
        params.areaRng, params.areaRngLbl, params.maxDets = params.areaRng[:1], params.areaRngLbl[:1], [100]
        evaluation.evaluate()
        # By category and image: matched objects (T * D), -, scores (D), which objects and which detections are ignored.
        states = [one.__getstate__() for one in evaluation._evalImgs_cpp]
        parts = [(matched, scores, objects, ignored) for matched, _, scores, objects, ignored, *_ in states]
    joined = {number: _joined(parts[i * count : (i + 1) * count]) for i, number in enumerate(categories)}
    return Matches(tuple(image_ids), joined)


def _joined(parts: Sequence[tuple[list[Any], ...]]) -> _Category:
    """Put the detections of one category in order, from the four lists of each image that `match` reads."""
    matched, ignored = (
        np.concatenate([np.reshape(part[i], (THRESHOLDS, -1)) for part in parts], axis=1) > 0 for i in (0, 3)
    )
    score = np.concatenate([part[1] for part in parts])
    image = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    order = np.argsort(-score, kind="stable")
    image, score, counts = image[order], score[order], ~ignored[:, order]
    starts = (np.diff(image, prepend=-1) != 0) | (np.diff(score, prepend=np.inf) != 0)
    objects = np.array([part[2].count(False) for part in parts], np.int64)
    return _Category(image, matched[:, order] & counts, counts, objects, np.cumsum(starts))


def bootstrap(systems: Mapping[str, Matches], *, resamples: int = 1000, seed: int = 0) -> dict[str, dict[str, Floats]]:
    """Return AP, AP50 and AP75 of every resample (resamples,), by system.

    The r-th resample has the same images for all systems, so that their differences are paired.
    """
    images = {system.image_ids for system in systems.values()}
    if len(images) != 1:
        raise ValueError(f"systems must be judged on the same images, got {len(images)} different sets of them")
    count = len(images.pop())
    draws = np.random.default_rng(derived_seed(seed, "bootstrap"))
    weights = [np.bincount(draws.integers(count, size=count), minlength=count) for _ in range(resamples)]
    found = {name: [system.average_precision(some) for some in weights] for name, system in systems.items()}
    return {name: {n: np.array([one[n] for one in ones]) for n in NUMBERS} for name, ones in found.items()}


def interval(samples: Floats, level: float = 0.95) -> tuple[float, float]:
    """Return the ends of the middle `level` of the samples, leaving out nan."""
    low, high = np.nanquantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
