"""AP again and again on resampled images: detections are matched with objects once per image.

    dense, reduced = (bootstrap(truth, results, "segm", resamples=1000) for results in (dense_results, reduced_results))
    interval(reduced - dense)

COCO matches the detections of every image on its own, and only then sorts all of them by score. So an image that is
drawn three times counts three times without matching again. faster-coco-eval matches; its accumulation, which takes
copies and no weights, would need ten times as long for each resample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agglo.lab.tasks.detection.evaluation.average_precision import coco_evaluation
from agglo.utils.randomness import derived_seed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

THRESHOLDS = 10  # of IoU, from 0.5 to 0.95
RECALLS = np.linspace(0.0, 1.0, 101)


def bootstrap(
    ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str, *, resamples: int
) -> Floats:
    """Return the AP, from 0 to 1, of every resample (resamples,) of the images, of kind "bbox" or "segm".

    The r-th resample has the same images for all detectors, so that their differences are paired. AP is nan where no
    object is drawn.
    """
    count, draws = len(ground_truth["images"]), np.random.default_rng(derived_seed(0, "bootstrap"))
    categories = matched(ground_truth, detections, kind)
    weights = (np.bincount(draws.integers(count, size=count), minlength=count) for _ in range(resamples))
    return np.array([weighted_ap(categories, each) for each in weights])


def interval(samples: Floats) -> tuple[float, float]:
    """Return the ends of the middle 95 % of the samples, leaving out nan."""
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return float(low), float(high)


class Category(NamedTuple):
    """All detections of one category, image by image."""

    image: Ints  # (D,), the index of each detection's image
    score: Floats  # (D,)
    right: Bools  # (T, D), whether it matches an object, at each threshold
    counts: Bools  # (T, D), whether it counts at all: not if it matches a crowd
    objects: Ints  # (I,), the number of objects to be found in each image


def weighted_ap(categories: Sequence[Category], weights: Ints) -> float:
    """Return AP where the i-th image counts weights[i] times, by the order of the images' ids."""
    found = [_precisions(category, weights) for category in categories if category.objects @ weights]
    return float(np.mean(found)) if found else math.nan


def _precisions(category: Category, weights: Ints) -> Floats:
    """Return the mean over recalls of the precision at each threshold (T,)."""
    copies = _copies(category, weights[category.image])
    right, counts = category.right[:, copies], category.counts[:, copies]
    found = np.zeros(THRESHOLDS)
    for number in range(THRESHOLDS):
        at = np.flatnonzero(right[number])  # where the best precision at a recall is reached
        hits, seen = np.arange(1, len(at) + 1), np.cumsum(counts[number])[at]
        curve = np.maximum.accumulate((hits / np.maximum(seen, 1))[::-1])[::-1]
        reached = np.searchsorted(hits / int(category.objects @ weights), RECALLS, side="left")
        found[number] = curve[reached[reached < len(curve)]].sum() / len(RECALLS)
    return found


def _copies(category: Category, weight: Ints) -> Ints:
    """Return the index of every detection as often as its weight says, best first.

    Copies of an image with several detections of one score follow each other as a whole: a b a b, not a a b b.
    """
    chosen = np.repeat(np.arange(len(weight)), weight)
    copy = np.arange(len(chosen)) - np.repeat(np.cumsum(weight) - weight, weight)
    return chosen[np.lexsort((chosen, copy, category.image[chosen], -category.score[chosen]))]


def matched(ground_truth: Mapping[str, Any], detections: Sequence[Mapping[str, Any]], kind: str) -> Sequence[Category]:
    """Match the detections of every image with its objects; return the categories in the order of their ids."""
    evaluation = coco_evaluation(ground_truth, detections, kind, separate_eval=True)
    params, count = evaluation.params, len(ground_truth["images"])
    params.areaRng, params.areaRngLbl, params.maxDets = params.areaRng[:1], params.areaRngLbl[:1], [100]
    evaluation.evaluate()
    # By category and image: matched objects (T * D), -, scores (D), which objects and which detections are ignored.
    states = [one.__getstate__() for one in evaluation._evalImgs_cpp]
    categories = []
    for start in range(0, len(states), count):
        parts = states[start : start + count]
        found, ignored = (
            np.concatenate([np.reshape(part[i], (THRESHOLDS, -1)) for part in parts], axis=1) > 0 for i in (0, 4)
        )
        score = np.concatenate([part[2] for part in parts])
        image = np.repeat(np.arange(count), [len(part[2]) for part in parts])
        objects = np.array([part[3].count(False) for part in parts], np.int64)
        categories.append(Category(image, score, found & ~ignored, ~ignored, objects))
    return categories
