"""Images of a diffusion model are what the library draws."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import agglo
from agglo.drawing.groups import first_members
from agglo.embedded import generator as embedded
from agglo.lab.playground.models import Models
from agglo.lab.playground.settings import choose
from agglo.lab.playground.synthesis import draw
from agglo.lab.tasks.synthesis.evaluation.grid import panel_pixels

pytest.importorskip("diffusers")
STEPS = 4


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(steps=STEPS)


@pytest.mark.parametrize("config", [None, choose("tomesd", keep_rate=0.5), choose("atc", "single", keep_rate=0.5)])
def test_an_image_and_its_groups_are_the_librarys(models: Models, config: agglo.ReductionConfig | None) -> None:
    told: list[int] = []
    with models.generator.use() as generator:
        drawn = draw(generator, models.request("Bag", 3), config, told.append)
        assert agglo.report(generator.reduced) is None  # dense afterwards
    assert told == [1, 2, 3, 4]
    model = embedded.trained()
    if config is None:
        sample = embedded.sample(model, [8], [3], steps=STEPS)
        assert drawn.steps == {} and drawn.counts == []
    else:
        agglo.apply(model, config)
        with agglo.trace(model, passes=STEPS) as trace:
            sample = embedded.sample(model, [8], [3], steps=STEPS)
        assert list(drawn.steps) == [1, 3, 4] and drawn.counts == [128] * 8
        for step, labels in drawn.steps.items():
            expected = first_members(trace.passes[step - 1][0].total.labels)[0].reshape(16, 16)
            assert np.array_equal(labels, expected)
    assert drawn.image is not None
    assert np.array_equal(drawn.image, panel_pixels(Image.fromarray(sample[0, 0].numpy())))


def test_what_cannot_be_drawn_is_said(models: Models) -> None:
    request = models.request("Bag", 0)
    with models.generator.use() as generator:
        refused = draw(generator, request, choose("tomesd", keep_rate=0.1))
        dense, other = draw(generator, request, None), draw(generator, models.request("Bag", 1), None)
    assert refused.refused is not None and refused.image is None and refused.difference(dense) is None
    assert dense.difference(dense) == 0 and (other.difference(dense) or 0) > 1
    with pytest.raises(ValueError, match="class"):
        models.request("Hat", 0)
