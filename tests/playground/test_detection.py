"""What the page finds in a picture is what the detector finds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo import tracing
from agglo.detection.data.transforms import transforms_for
from agglo.detection.specs import Opened, open_detector
from agglo.drawing.groups import patch_labels
from agglo.experiments.evaluation.turns import timed_pass
from agglo.playground import detection
from agglo.playground.detection import detect, pairs
from agglo.playground.examples import picture
from agglo.playground.page.detection_html import detected_html
from agglo.playground.settings import choose

pytest.importorskip("torchvision")
SCENE = "example:scene 2"
ATC = choose("atc", "average", keep_rate=0.7)


@pytest.fixture(scope="module")
def opened() -> Opened:
    return open_detector("embedded")


def test_dense_and_reduced_are_the_librarys(opened: Opened) -> None:
    found = detect(opened, picture(SCENE), ATC, 0.5)
    model = open_detector("embedded").model
    pixels, _ = transforms_for(opened.spec.image_size)[1](picture(SCENE), {})
    size = [picture(SCENE).size[::-1]]
    with torch.inference_mode():
        dense = model([pixels], original_sizes=size)[0]
        reduced = agglo.apply(model, "atc", keep_rate=0.7)([pixels], original_sizes=size)[0]
    assert found.reduced is not None
    for mine, its in ((found.dense, dense), (found.reduced, reduced)):
        sure = its["scores"] >= 0.5
        assert 0 < sure.sum() == len(mine.objects["labels"])
        assert np.allclose(mine.objects["boxes"], its["boxes"][sure].numpy(), atol=1e-3)
        assert np.array_equal(mine.objects["masks"], its["masks"][sure].numpy())
    told = agglo.reduction(model)
    assert told is not None and len(found.counts) == 3
    assert list(found.counts.values()) == [told.counts[block] for block in found.counts]  # type: ignore[index]
    assert (found.dense.gflops, found.reduced.gflops) == (told.gflops_before, told.gflops_after)
    assert agglo.reduction(opened.model) is None


def test_groups_are_shown_after_every_reduction(opened: Opened) -> None:
    found = detect(opened, picture(SCENE), ATC, 0.5)
    model = agglo.apply(open_detector("embedded").model, "atc", keep_rate=0.7)
    pixels, _ = transforms_for(opened.spec.image_size)[1](picture(SCENE), {})
    with torch.inference_mode(), agglo.trace(model) as trace:
        model([pixels], original_sizes=[picture(SCENE).size[::-1]])
    expected = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(found.stages) == list(expected) and len(expected) > 1
    assert all(np.array_equal(found.stages[block].reshape(-1), expected[block]) for block in expected)
    page = detected_html(found)
    shown = re.findall(r'data-labels="([^"]*)"[^>]*data-name="([^"]*)"', page)
    assert shown == [(",".join(map(str, of)), f"atc average after block {block}") for block, of in expected.items()]


def test_nothing_reduced_is_no_groups_and_no_error(opened: Opened) -> None:
    found = detect(opened, picture(SCENE), choose("atc", "average", keep_rate=1.0), 0.5)
    assert found.reduced is not None and set(found.counts.values()) <= {196}
    assert detected_html(found).count("data-labels") == len(found.stages)


def test_the_time_is_of_a_pass_that_nobody_watches(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[bool] = []

    def timing(run: Any, inputs: Any) -> Any:
        watched.append(tracing._any_open)
        return timed_pass(run, inputs)

    monkeypatch.setattr(detection, "timed_pass", timing)
    assert detect(opened, picture(SCENE), ATC).stages
    assert watched == [False, False]


def test_every_object_is_in_one_pair(opened: Opened) -> None:
    found = detect(opened, picture(SCENE), ATC, 0.05)
    assert found.reduced is not None
    assert sum(pair.dense is not None for pair in found.pairs) == len(found.dense.objects["labels"])
    assert sum(pair.reduced is not None for pair in found.pairs) == len(found.reduced.objects["labels"])
    assert all((pair.overlap is None) == (pair.dense is None or pair.reduced is None) for pair in found.pairs)


def objects(*each: tuple[list[float], int, float]) -> dict[str, np.ndarray]:
    boxes = np.array([box for box, _, _ in each], np.float32).reshape(-1, 4)
    return {
        "boxes": boxes,
        "labels": np.array([label for _, label, _ in each], np.int64),
        "scores": np.array([score for _, _, score in each], np.float32),
    }


def test_pairs_are_of_one_class_and_overlap_by_half() -> None:
    dense = objects(([0, 0, 10, 10], 0, 0.9), ([20, 20, 30, 30], 1, 0.8), ([50, 50, 60, 60], 0, 0.7))
    reduced = objects(
        ([0, 0, 10, 8], 0, 0.6),  # 80 %
        ([20, 20, 30, 30], 0, 0.5),  # another class
        ([50, 50, 60, 54], 0, 0.4),  # 40 %
    )
    found = pairs(dense, reduced, ["shirt", "bag"])
    assert [(pair.name, pair.dense is None, pair.reduced is None) for pair in found] == [
        ("shirt", False, False),
        ("bag", False, True),
        ("shirt", False, True),
        ("shirt", True, False),
        ("shirt", True, False),
    ]
    assert found[0].overlap == pytest.approx(0.8)


def test_nothing_to_find_and_nothing_to_pair(opened: Opened) -> None:
    assert pairs(objects(), objects(), []) == []
    found = detect(opened, picture(SCENE), ATC, 1.0)
    assert found.pairs == () and "Neither finds anything" in detected_html(found)


def test_what_cannot_be_is_said_beside_the_dense_picture(opened: Opened) -> None:
    found = detect(opened, picture(SCENE), choose("tome", "", keep_rate=0.2), 0.5)
    assert found.reduced is None and found.refused is not None and "tome cannot" in found.refused
    assert found.refused[:30] in detected_html(found).replace("&#x27;", "'")
    with pytest.raises(ValueError, match="score=2"):
        detect(opened, picture(SCENE), ATC, 2)


def test_wide_photographs(opened: Opened) -> None:
    wide = picture("example:pagoda").resize((1500, 300))
    found = detect(opened, wide, ATC, 0.05)
    assert found.pixels.shape[1] == 1024 and found.dense.objects["masks"].shape[1:] == found.pixels.shape[:2]
    assert detected_html(found).count("<figure") == 3 + len(found.stages)
