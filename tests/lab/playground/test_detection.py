"""What the page finds in an image is what the detector finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo import tracing
from agglo.drawing.groups import patch_labels
from agglo.lab.playground import detection
from agglo.lab.playground.detection import detect, pairs
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.page.html import detected_html
from agglo.lab.playground.settings import choose
from agglo.lab.tasks.detection.data.transforms import transforms_for
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.utils.timing import timed_pass

pytest.importorskip("torchvision")
ATC = choose("atc", "average", keep_rate=0.7)


@pytest.fixture(scope="module")
def opened() -> Opened:
    return open_detector("embedded")


@pytest.fixture(scope="module")
def scene() -> Any:
    return chosen_image("example:scene 2")


def test_objects_and_groups_are_the_librarys(opened: Opened, scene: Any) -> None:
    found = detect(opened, scene, ATC, 0.5)
    assert agglo.report(opened.model) is None  # dense afterwards
    model = open_detector("embedded").model
    pixels, _ = transforms_for(opened.spec.image_size)[1](scene, {})
    size = [scene.size[::-1]]
    with torch.inference_mode():
        dense = model([pixels], original_sizes=size)[0]
        agglo.apply(model, "atc", keep_rate=0.7)
        with agglo.trace(model) as trace:
            reduced = model([pixels], original_sizes=size)[0]
    for mine, its in zip(found.passes, (dense, reduced), strict=True):
        sure = its["scores"] >= 0.5
        assert 0 < sure.sum() == len(mine.objects["labels"])
        assert np.allclose(mine.objects["boxes"], its["boxes"][sure].numpy(), atol=1e-3)
        assert np.array_equal(mine.objects["masks"], its["masks"][sure].numpy())
    applied = agglo.report(model)
    assert applied is not None and applied.counts is not None
    assert list(found.counts.values()) == [applied.counts[block] for block in found.counts]
    assert [one.gflops for one in found.passes] == [applied.gflops_before, applied.gflops_after]
    expected = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(found.stages) == list(expected) and len(expected) == 3
    assert all(np.array_equal(found.stages[block].reshape(-1), expected[block]) for block in expected)


def test_the_timed_pass_is_not_watched(opened: Opened, scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[bool] = []

    def timing(run: Any, inputs: Any) -> Any:
        watched.append(tracing._any_open)
        return timed_pass(run, inputs)

    monkeypatch.setattr(detection, "timed_pass", timing)
    assert detect(opened, scene, ATC).stages
    assert watched == [False, False]


def objects(*each: tuple[list[float], int, float]) -> dict[str, np.ndarray]:
    return {
        "boxes": np.array([box for box, _, _ in each], np.float32).reshape(-1, 4),
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
    assert pairs(objects(), objects(), []) == []


def test_nothing_found_nothing_reduced_and_what_cannot_be(opened: Opened, scene: Any) -> None:
    nothing = detect(opened, scene, ATC, 1.0)
    assert not nothing.pairs and "Who found what" not in detected_html(nothing)
    whole = detect(opened, scene, choose("atc", "average", keep_rate=1.0), 0.5)
    assert set(whole.counts.values()) <= {196} and detected_html(whole).count("data-labels") == len(whole.stages)
    cannot = detect(opened, scene, choose("tome", "", keep_rate=0.2), 0.5)
    assert cannot.reduced is None and "tome" in str(cannot.refused) and 'class="refused"' in detected_html(cannot)
    with pytest.raises(ValueError, match="score"):
        detect(opened, scene, ATC, 2)


def test_wide_photographs(opened: Opened) -> None:
    found = detect(opened, chosen_image("example:pagoda").resize((1500, 300)), ATC, 0.05)
    assert found.pixels.shape[1] == 1024 and found.dense.objects["masks"].shape[1:] == found.pixels.shape[:2]
    assert detected_html(found).count("<figure") == 3 + len(found.stages)
