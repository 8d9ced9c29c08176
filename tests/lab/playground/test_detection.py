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
from agglo.lab.playground.detection import detect
from agglo.lab.playground.html import render
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.settings import choose
from agglo.lab.tasks.detection.data.transforms import transforms_for
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.utils.timing import timed_pass

pytest.importorskip("torchvision")
ATC = choose("atc", keep_rate=0.7)
SCENE = chosen_image("example:scene 2")


@pytest.fixture(scope="module")
def opened() -> Opened:
    return open_detector("embedded")


def test_objects_and_groups_are_the_librarys(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[bool] = []

    def timing(run: Any, inputs: Any) -> Any:
        watched.append(tracing.any_open)
        return timed_pass(run, inputs)

    monkeypatch.setattr(detection, "timed_pass", timing)
    found = detect(opened, SCENE, ATC, 0.5)
    assert watched == [False, False]  # what is timed is not watched
    assert agglo.report(opened.model) is None  # dense afterwards
    model = open_detector("embedded").model
    pixels, _ = transforms_for(opened.spec.image_size)[1](SCENE, {})
    size = [SCENE.size[::-1]]
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
    assert found.reduced.counts == [applied.counts[block] for block in found.reduced.stages]
    assert [one.gflops for one in found.passes] == [applied.gflops_before, applied.gflops_after]
    expected = {block: of[0] for block, of in patch_labels(trace).items()}
    assert list(found.reduced.stages) == list(expected) and len(expected) == 3
    assert all(np.array_equal(found.reduced.stages[block].reshape(-1), expected[block]) for block in expected)


def test_nothing_found_and_what_cannot_be_reduced(opened: Opened) -> None:
    assert 'class="objects">0<' in render("detection", found=detect(opened, SCENE, ATC, 1.0))
    cannot = detect(opened, SCENE, choose("tome", keep_rate=0.2), 0.5)
    assert "tome" in str(cannot.reduced.refused) and 'class="refused"' in render("detection", found=cannot)


def test_wide_photographs(opened: Opened) -> None:
    found = detect(opened, chosen_image("example:pagoda").resize((1500, 300)), ATC, 0.05)
    assert found.pixels.shape[1] == 1024 and found.dense.objects["masks"].shape[1:] == found.pixels.shape[:2]
    assert render("detection", found=found).count("<figure") == 2 + len(found.reduced.stages)
