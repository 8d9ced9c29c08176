"""COCO's numbers against pycocotools, and resampled ones against their definition."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from agglo.lab.tasks.detection.data.base import encode
from agglo.lab.tasks.detection.evaluation.average_precision import NUMBERS, as_coco_results, average_precision
from agglo.lab.tasks.detection.evaluation.bootstrap import bootstrap, interval, matched, weighted_ap

SIDE = 140


def rectangle(x: int, y: int, w: int, h: int) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), bool)
    mask[y : y + h, x : x + w] = True
    return mask


def entry(number: int, image: int, category: int, mask: np.ndarray, **more: Any) -> dict[str, Any]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = [float(v) for v in (columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1)]
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": float(mask.sum()),
        "iscrowd": 0,
        "segmentation": encode(mask[None])[0],
        **more,
    }


def coco(wanted: list[dict[str, Any]], n_images: int, categories: tuple[int, ...] = (3, 7)) -> dict[str, Any]:
    return {
        "images": [{"id": number, "height": SIDE, "width": SIDE} for number in range(1, n_images + 1)],
        "categories": [{"id": number, "name": str(number)} for number in categories],
        "annotations": wanted,
    }


def results(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("image_id", "category_id", "bbox", "segmentation", "score")
    return [{key: one[key] for key in kept} for one in found]


def random_case(seed: int, n_images: int = 6, ties: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Objects of all sizes, some of them crowds; detections near them, doubled, of the wrong class, or anywhere."""
    draws = np.random.default_rng(seed)
    wanted, found = [], []

    def thing(low: int = 6, high: int = 120) -> tuple[int, int, int, int]:
        w, h = (int(low * (high / low) ** draws.random()) for _ in range(2))
        return int(draws.integers(SIDE - w)), int(draws.integers(SIDE - h)), w, h

    for image in range(1, n_images + 1):
        for _ in range(draws.integers(0, 6)):
            x, y, w, h = thing()
            category = int(draws.choice((3, 7)))
            crowd = int(draws.random() < 0.2)
            mask = rectangle(x, y, w, h)
            mask[y : y + h // 2, x : x + w // 3] = False  # boxes and masks must not agree
            wanted.append(entry(len(wanted) + 1, image, category, mask, iscrowd=crowd))
            for _ in range(draws.integers(0, 4)):
                dx, dy, dw, dh = (int(v) for v in draws.integers(-4, 5, 4))
                moved = rectangle(max(x + dx, 0), max(y + dy, 0), max(w + dw, 3), max(h + dh, 3))
                other = category if draws.random() < 0.85 else 10 - category
                found.append(entry(0, image, other, moved, score=float(draws.random())))
        for _ in range(draws.integers(0, 3)):
            found.append(entry(0, image, int(draws.choice((3, 7))), rectangle(*thing()), score=float(draws.random())))
    if ties:
        for one in found:
            one["score"] = round(one["score"], 1)
    return wanted, found


@pytest.mark.parametrize("ties", [False, True])
def test_all_numbers_are_those_of_pycocotools(ties: bool) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    wanted, found = random_case(int(ties), ties=ties)
    shifted = [{**one, "id": one["id"] - 1} for one in wanted]  # an annotation may have the id 0
    given = copy.deepcopy((coco(shifted, 6), results(found)))
    numbers = average_precision(*given)
    assert given == (coco(shifted, 6), results(found))
    for kind in ("bbox", "segm"):
        truth = COCO()
        truth.dataset = copy.deepcopy(coco(wanted, 6))
        truth.createIndex()
        given = [{k: v for k, v in one.items() if kind == "bbox" or k != "bbox"} for one in results(found)]
        evaluation = COCOeval(truth, truth.loadRes(given), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        theirs = [math.nan if value < 0 else value for value in evaluation.stats]
        expected = dict(zip(NUMBERS, theirs, strict=True))
        assert numbers[kind] == pytest.approx(expected, abs=1e-9, nan_ok=True), kind
        once = weighted_ap(matched(coco(wanted, 6), results(found), kind), np.ones(6, np.int64))
        assert once == pytest.approx(expected["AP"], abs=1e-9)


def test_a_weighted_image_counts_as_that_many_copies() -> None:
    wanted, found = random_case(11, n_images=8, ties=True)
    truth, given = coco(wanted, 8), results(found)
    categories = matched(truth, given, "bbox")
    draws = np.random.default_rng(0)
    for _ in range(4):
        weights = np.bincount(draws.integers(8, size=8), minlength=8)
        copies, again = [], []
        for image, times in enumerate(weights, start=1):
            for _ in range(times):
                new = len(copies) + 1
                copies.append(image)
                again += [{**one, "image_id": new} for one in given if one["image_id"] == image]
        objects = [
            {**one, "image_id": new}
            for new, image in enumerate(copies, 1)
            for one in wanted
            if one["image_id"] == image
        ]
        expected = average_precision(coco(objects, len(copies)), again)["bbox"]
        assert weighted_ap(categories, weights) == pytest.approx(expected["AP"], abs=1e-9)


def test_nothing_found_is_0_and_nothing_to_find_is_nan() -> None:
    wanted, found = random_case(0)
    nothing = average_precision(coco(wanted, 6), [])
    assert nothing["bbox"]["AP"] == nothing["segm"]["AR100"] == 0
    assert weighted_ap(matched(coco(wanted, 6), [], "segm"), np.ones(6, np.int64)) == 0
    for truth in (coco([], 6), coco([{**one, "iscrowd": 1} for one in wanted], 6)):
        numbers = average_precision(truth, results(found))
        assert all(math.isnan(value) for kind in numbers.values() for value in kind.values())
        assert np.isnan(bootstrap(truth, results(found), "segm", resamples=2)).all()


def test_a_detection_that_fits_nothing_is_refused() -> None:
    wanted, found = random_case(0)
    for change, named in (({"image_id": 99}, "image 99"), ({"category_id": 5}, "y 5"), ({"score": math.nan}, "nan")):
        given = results(found)
        given[2] |= change
        with pytest.raises(ValueError, match=rf"detection 2 .*{named}"):
            average_precision(coco(wanted, 6), given)


def test_detector_outputs_become_results() -> None:
    mask = torch.from_numpy(rectangle(10, 20, 30, 40))
    one = {
        "boxes": torch.tensor([[10.0, 20.0, 40.0, 60.0]]),
        "scores": torch.tensor([0.5], dtype=torch.float16),
        "labels": torch.tensor([1]),
        "masks": mask[None],
    }
    none = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0).long()}
    none["masks"] = torch.zeros(0, SIDE, SIDE, dtype=torch.bool)
    found = as_coco_results([none, one], [4, 9], (3, 7))
    expected = {"image_id": 9, "category_id": 7, "bbox": [10, 20, 30, 40], "score": 0.5}
    assert [{key: value for key, value in result.items() if key != "segmentation"} for result in found] == [expected]
    truth = coco([entry(1, 9, 7, mask.numpy())], 9)
    assert average_precision(truth, found)["segm"]["AP"] == pytest.approx(1)


def test_bootstrap_is_paired_and_repeatable() -> None:
    wanted, found = random_case(5, n_images=30, ties=True)
    truth, given = coco(wanted, 30), results(found)
    good, again = (bootstrap(truth, given, "bbox", resamples=60) for _ in range(2))
    low, high = interval(good)
    assert low < average_precision(truth, given)["bbox"]["AP"] < high
    assert interval(good - again) == (0, 0) and low > 0
