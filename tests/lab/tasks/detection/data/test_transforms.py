"""The paper's pipelines: sizes as specified, boxes and masks that stay with the image, draws that come again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agglo.lab.tasks.detection.data import transforms
from agglo.lab.tasks.detection.data.base import Target, target_of
from agglo.lab.tasks.detection.data.transforms import RandomCrop, transforms_for


def rectangles(height: int, width: int, n_objects: int = 5) -> tuple[Any, Target]:
    """Filled rectangles, each of its own grey, later ones over earlier ones: image, masks and boxes say the same."""
    draws = np.random.default_rng(0)
    pixels = np.zeros((height, width), np.uint8)
    masks = np.zeros((n_objects, height, width), np.uint8)
    for number in range(n_objects):
        h, w = draws.integers(1, height + 1), draws.integers(1, width + 1)
        y, x = draws.integers(0, height - h + 1), draws.integers(0, width - w + 1)
        masks[:number, y : y + h, x : x + w] = 0
        masks[number, y : y + h, x : x + w] = 1
        pixels[y : y + h, x : x + w] = 40 * (number + 1)
    visible = [number for number in range(n_objects) if masks[number].any()]
    boxes = [around(torch.from_numpy(masks[number])) for number in visible]
    target = target_of(boxes, visible, masks[visible], 7, (height, width))
    return Image.fromarray(pixels).convert("RGB"), target


def around(mask: torch.Tensor) -> list[float]:
    rows, columns = mask.nonzero().T
    return [float(v) for v in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)]


def check(pixels: torch.Tensor, target: Target) -> None:
    """Sizes fit, nothing has vanished, masks lie in their boxes."""
    n, (height, width) = len(target["labels"]), pixels.shape[-2:]
    assert target["masks"].shape == (n, height, width) and target["boxes"].shape == (n, 4)
    for box, mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
        assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height
        tight = around(mask)
        assert all(t >= b - 1 for t, b in zip(tight[:2], box[:2], strict=True))
        assert all(t <= b + 1 for t, b in zip(tight[2:], box[2:], strict=True))


class Crop(RandomCrop):
    """A crop of a given window."""

    def __init__(self, top: int, left: int, height: int, width: int) -> None:
        super().__init__(0, 0)
        self.window = {"top": top, "left": left, "height": height, "width": width}

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return self.window


def test_a_crop_cuts_boxes_and_removes_what_is_gone() -> None:
    masks = np.zeros((3, 20, 20), np.uint8)
    masks[0, 0:10, 0:10] = 1
    masks[1, 12:18, 12:18] = 1
    masks[2, 0:20, 0] = masks[2, 0, 0:20] = 1  # an L: its box reaches into the window, it does not
    target = target_of([[0, 0, 10, 10], [12, 12, 18, 18], [0, 0, 20, 20]], [4, 5, 6], masks, 1, (20, 20))
    image = Image.new("RGB", (20, 20))
    pixels, cut = transforms._finished(Crop(5, 5, 6, 7))(image, target)
    assert pixels.shape == (3, 6, 7)
    assert cut["labels"].tolist() == [4] and cut["boxes"].tolist() == [[0, 0, 5, 5]]
    assert cut["masks"].sum() == 25 and (cut["image_id"], cut["original_size"]) == (1, (20, 20))
    _, empty = transforms._finished(Crop(10, 2, 2, 2))(image, target)
    assert empty["boxes"].shape == (0, 4) and empty["masks"].shape == (0, 2, 2)  # a crop may show nothing


def test_the_test_pipeline_has_the_released_sizes() -> None:
    for size, expected in (((480, 640), (800, 1067)), ((427, 640), (800, 1199)), ((600, 200), (1333, 444))):
        pixels, target = transforms_for(None)[1](*rectangles(*size))
        assert tuple(pixels.shape) == (3, *expected) and target["original_size"] == size
        check(pixels, target)


def test_the_training_pipeline_draws_what_is_specified() -> None:
    image, training = Image.new("RGB", (640, 480)), transforms_for(None)[0]
    torch.manual_seed(0)
    shapes = [tuple(training(image, {})[0].shape[1:]) for _ in range(150)]
    assert max(map(max, shapes)) == 1024  # the last crop
    whole = {tuple(transforms.size_for((480, 640), short)) for short in range(480, 801, 32)}
    cut = {(min(height, 1024), min(width, 1024)) for height, width in whole}
    kept = sum(shape in cut for shape in shapes)
    assert {shape for shape in shapes if shape in cut} == cut
    assert 50 < kept < 110  # half of them, and a few crops that happen to have such a size
    # After the first crop no side is more than 600 / 384 of the other, so the short side is always one of the scales.
    assert {min(shape) for shape in shapes} == set(range(480, 801, 32))
    pixels = torch.zeros(3, 500, 900, dtype=torch.uint8)
    crops = [RandomCrop(384, 600)(pixels).shape[1:] for _ in range(300)]
    rows, columns = zip(*crops, strict=True)
    assert 384 <= min(rows) < 394 and 490 < max(rows) <= 500
    assert 384 <= min(columns) < 394 and 590 < max(columns) <= 600
    assert len(set(shapes)) > len(cut) + 30


def test_normalisation_is_of_bytes_in_rgb() -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 100))
    pixels, _ = transforms_for(8)[1](image, {})
    expected = [(255 - 123.675) / 58.395, (0 - 116.28) / 57.12, (100 - 103.53) / 57.375]
    assert pixels[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_odd_images_pass_every_pipeline() -> None:
    torch.manual_seed(0)
    for transform in (*transforms_for(None), *transforms_for(64)):
        for height, width, n_objects in ((1, 1, 3), (333, 2, 0)):
            check(*transform(*rectangles(height, width, n_objects)))
    with pytest.raises(ValueError, match="image_size=0"):
        transforms_for(0)
