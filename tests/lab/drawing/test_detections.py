"""Objects over images: drawn where they are, named where there is room, nothing left out without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.lab.drawing.detections import WASH, draw_detections

CLASSES = ["cat", "dog", "bird"]


def objects(height: int = 90, width: int = 120, **more: Any) -> dict[str, Any]:
    masks = torch.zeros(2, height, width, dtype=torch.bool)
    masks[0, 20:60, 10:50] = True
    masks[1, 30:80, 70:110] = True
    boxes = torch.tensor([[10.0, 20, 50, 60], [70, 30, 110, 80]])
    return {"boxes": boxes, "labels": torch.tensor([0, 2]), "masks": masks, **more}


def black(height: int = 90, width: int = 120) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


def test_a_mask_is_washed_in_its_colour_and_lined() -> None:
    image = np.full((90, 120, 3), 100, np.uint8)
    drawn = draw_detections(image, objects(), CLASSES)
    assert drawn.summary == "2 objects"
    line = drawn.pixels[40, 10].astype(float)
    inside = drawn.pixels[45, 30].astype(float)
    assert inside == pytest.approx((1 - WASH) * 100 + WASH * line, abs=1)
    assert (drawn.pixels[85, 5] == 100).all()  # nothing beside objects
    other = drawn.pixels[70, 70].astype(float)
    assert np.abs(line - other).max() > 50  # each class its colour
    assert (image == 100).all()


def test_masks_that_overlap_are_drawn_over_one_another() -> None:
    twice = {name: torch.cat([values[:1]] * 2) for name, values in objects().items()}
    assert draw_detections(black(), twice, CLASSES).pixels[45, 30].any()


def test_scores_are_the_threshold() -> None:
    found = objects(scores=torch.tensor([0.9, 0.2]))
    assert draw_detections(black(), found, CLASSES).summary == "1 object"
    assert draw_detections(black(), found, CLASSES, least=0.1).summary == "2 objects"
    nothing = draw_detections(black(), found, CLASSES, least=0.95)
    assert not nothing.pixels.any() and nothing.summary == "0 objects"


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 12), st.integers(0, 10**6))
def test_anything_can_be_drawn(height: int, width: int, n: int, seed: int) -> None:
    """Boxes beyond the image or thinner than a pixel, empty masks, images of one pixel."""
    draws = np.random.default_rng(seed)
    corners = draws.uniform(-10, 70, (n, 2))
    boxes = np.concatenate([corners, corners + draws.uniform(0, 30, (n, 2))], axis=1)
    found = {
        "boxes": boxes,
        "labels": draws.integers(0, 3, n),
        "scores": draws.random(n),
        "masks": draws.random((n, height, width)) < draws.choice([0, 0.5, 1]),
    }
    drawn = draw_detections(black(height, width), found, CLASSES, least=0.0)
    assert drawn.pixels.shape == (height, width, 3) and drawn.summary.startswith(f"{n} object")


def test_classes_keep_their_colours_across_a_sheet() -> None:
    second = {key: value[1:] for key, value in objects().items()}
    both = draw_detections(black(), objects(), CLASSES, present=[0, 2]).pixels
    alone = draw_detections(black(), second, CLASSES, present=[0, 2]).pixels
    assert (both[70, 70] == alone[70, 70]).all()
