"""Images of groups, held to their definitions: composed labels, mean colours, outlines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.drawing import groups as drawing
from agglo.grouping import Grouping
from agglo.methods import Outcome
from agglo.tracing import Step, Trace

timm = pytest.importorskip("timm")
pytest.importorskip("PIL.Image")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

RANDOM = np.random.default_rng(0)


def two_stages(prefix: int) -> Trace:
    """Six patches, then four groups, then two, numbered in no particular order."""
    first = Grouping.of(torch.tensor([[3, 0, 0, 1, 2, 3]]), 4, prefix)
    second = Grouping.of(torch.tensor([[1, 0, 1, 0]]), 2, prefix, first.sizes)
    trace = Trace()
    trace.record([Step(3, Outcome(first), first), Step(6, Outcome(second), first.then(second))])
    return trace


def small_model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": (64, 96), "patch_size": 8, "embed_dim": 48, "depth": 8, "num_heads": 3, "num_classes": 10}
    return VisionTransformer(**settings, **options).eval()


def traced(model: nn.Module, images: Tensor, **reduction: object) -> Trace:
    agglo.apply(model, **reduction)
    with torch.no_grad(), agglo.trace(model) as trace:
        model(images)
    return trace


def test_labels_are_composed_over_stages_and_named_by_first_member() -> None:
    labels = drawing.patch_labels(two_stages(prefix=5))
    assert labels[3].tolist() == [[0, 1, 1, 3, 4, 0]]
    # Groups 0 and 2 of the first stage, patches 1, 2 and 4, become one; groups 1 and 3, patches 0, 3 and 5, the other.
    assert labels[6].tolist() == [[0, 1, 1, 0, 1, 0]]


@pytest.mark.parametrize("thickness", [1, 3])
def test_border_pixels_are_those_with_another_label_within_reach(thickness: int) -> None:
    labels = RANDOM.integers(0, 3, (3, 4)).repeat(5, axis=0).repeat(5, axis=1)
    edge = drawing.border(labels, thickness)
    for y, x in itertools.product(*map(range, labels.shape)):
        around = labels[max(0, y - thickness) : y + thickness + 1, max(0, x - thickness) : x + thickness + 1]
        assert edge[y, x] == (around != labels[y, x]).any()
    assert not drawing.border(np.zeros((8, 8), dtype=np.int64), 2).any()


def drawn_by_hand(image: np.ndarray, labels: np.ndarray, wash: float, thickness: int) -> np.ndarray:
    """The definition, pixel by pixel; labels are those of pixels."""
    line, hairline = drawing.border(labels, thickness), drawing.border(labels, thickness + 1)
    drawn = np.zeros(image.shape)
    for y, x in itertools.product(*map(range, labels.shape)):
        colour = (1 - wash) * image[y, x] + wash * image[labels == labels[y, x]].mean(axis=0).round()
        if labels[y, x] == drawing.DROPPED:
            colour = np.full(3, 0.4 * image[y, x].mean() + 0.6 * 128)
        if line[y, x]:
            colour = 0.1 * colour.round() + 0.9 * 255
        elif hairline[y, x]:
            colour = 0.55 * colour.round()
        drawn[y, x] = colour
    return drawn


@pytest.mark.parametrize("wash", [0.0, 0.65])
def test_groups_are_washed_lines_run_between_them_and_dropped_patches_are_grey(wash: float) -> None:
    image = RANDOM.integers(0, 256, (24, 40, 3), dtype=np.uint8)
    labels = RANDOM.integers(-1, 3, (3, 5))
    drawn = drawing.draw_groups(image, labels, scale=1, wash=wash, thickness=1)
    of_pixels = labels.repeat(8, axis=0).repeat(8, axis=1)
    assert drawn.dtype == np.uint8 and np.abs(drawn - drawn_by_hand(image, of_pixels, wash, 1)).max() <= 1
    assert drawing.draw_groups(image, labels, scale=3).shape == (72, 120, 3)
    kept = of_pixels != drawing.DROPPED
    without_lines = drawing.draw_groups(image, labels, scale=1, wash=1, thickness=0)
    assert (without_lines[kept] == drawing.fill(image, labels)[kept]).all()


def test_rows_of_a_model_on_a_grid_that_is_not_square(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(2, 3, 64, 96)
    trace = traced(small_model(reg_tokens=4), images, keep_rate=0.5)
    assert agglo.draw(trace, images, names=["one", "two"]).size[0] > 4 * 2 * 96
    monkeypatch.setattr(drawing, "compose", lambda rows: rows)
    rows: Any = agglo.draw(trace, images, names=["one", "two"], scale=3)
    for row in rows:
        assert [int(panel.title.split()[-2]) for panel in row.panels] == [96, 48, 24, 12]
    assert {panel.pixels.shape for row in rows for panel in row.panels} == {(192, 288, 3)}
    assert (rows[1].panels[0].pixels == drawing.enlarged(drawing.as_pixels(images)[1], 3)).all()
    assert [row.name for row in rows] == ["one", "two"]
    for earlier, later in itertools.pairwise(drawing.patch_labels(trace).values()):
        assert set(later.ravel()) <= set(earlier.ravel())  # names of groups live on from stage to stage


def test_groups_of_a_padded_grid_lie_where_the_image_is() -> None:
    labels = np.arange(12).reshape(3, 4)
    under = drawing.stretch(labels, (50, 70), spans=(2.5, 3.5))
    assert under.shape == (50, 70)
    assert (under[:20, :20] == 0).all() and (under[40:, 60:] == 11).all() and under[19, 20] == 1 and under[20, 0] == 4
    assert np.array_equal(drawing.stretch(labels, (6, 8)), labels.repeat(2, 0).repeat(2, 1))


@pytest.mark.parametrize(
    ("images", "options", "names"),
    [
        (torch.rand(1, 3, 8, 8), {}, "grid="),
        (torch.rand(1, 3, 8, 8), {"grid": (2, 2)}, "grid="),
        (torch.rand(2, 3, 8, 12), {}, "2 images"),
        (torch.randn(1, 3, 8, 12), {}, "normalisation"),
        (torch.rand(3, 8, 12), {}, "(B, 3, H, W)"),
        (torch.rand(1, 3, 8, 12), {"names": ["a", "b"]}, "2 names"),
    ],
)
def test_what_does_not_fit_is_refused(images: Tensor, options: Any, names: str) -> None:
    with pytest.raises(ValueError) as refused:
        agglo.draw(two_stages(1), images, **options)
    assert names in str(refused.value)
