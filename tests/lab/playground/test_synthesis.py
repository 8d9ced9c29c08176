"""Images of a diffusion model: what the library draws, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import agglo
from agglo.drawing.groups import first_members
from agglo.embedded import generator as embedded
from agglo.lab.playground.models import Models, Wanted
from agglo.lab.playground.settings import choose
from agglo.lab.playground.synthesis import Drawn, _on_grid, draw
from agglo.lab.tasks.synthesis.evaluation.generators import EmbeddedGenerator
from agglo.lab.tasks.synthesis.evaluation.sheets import panel_pixels

pytest.importorskip("diffusers")
STEPS = 4
CHOSEN = [choose("tomesd", "", keep_rate=0.5), choose("atc", "single", keep_rate=0.5)]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(Wanted(steps=STEPS))


@pytest.fixture(scope="module")
def looks(models: Models) -> list[Drawn]:
    return list(draw(models.generator, models.request("Bag", 3), CHOSEN))


def test_each_image_and_its_groups_are_the_librarys(looks: list[Drawn]) -> None:
    columns, drawn = looks[-1].columns, []
    for column, config in zip(columns, [None, *(each.config for each in CHOSEN)], strict=True):
        model = embedded.trained()
        if config is None:
            sample = embedded.sample(model, [8], [3], steps=STEPS)
            assert column.groups is None and column.tokens == [] and column.difference is None
        else:
            agglo.apply(model, config)
            with agglo.trace(model, passes=STEPS) as trace:
                sample = embedded.sample(model, [8], [3], steps=STEPS)
            assert column.groups is not None and column.tokens == [128] * 8
            for groups, steps in zip(column.groups.steps, trace.passes, strict=True):
                assert {grid.dtype for grid in groups.values()} == {np.dtype(np.int16)}  # small: it is kept
                for step in steps:
                    expected = first_members(step.total.labels)[0].reshape(16, 16)
                    assert np.array_equal(groups[step.block], expected)
        drawn.append(panel_pixels(Image.fromarray(sample[0, 0].numpy())))
        assert np.array_equal(column.image, drawn[-1]), column.title
    assert columns[1].difference == pytest.approx(np.abs(drawn[1].astype(int) - drawn[0].astype(int)).mean())


def test_progress_goes_from_nothing_to_all(looks: list[Drawn]) -> None:
    done = [look.done for look in looks]
    assert done == sorted(done) and done[0] == pytest.approx(1 / (3 * STEPS)) and done[-1] == 1
    assert [look.columns[0].done for look in looks[:STEPS]] == [1, 2, 3, 4]
    assert looks[0].columns[1].image is None and looks[0].columns[0].image is not None
    assert [look.is_finished for look in looks] == [False] * (len(looks) - 1) + [True]


@pytest.mark.parametrize(("count", "kind"), [(128, np.int8), (129, np.int16), (32768, np.int16), (32769, np.int32)])
def test_labels_are_as_small_as_they_can_be(count: int, kind: type) -> None:
    labels = np.arange(count)
    labels[0] = -1
    small = _on_grid(labels, (count, 1))
    assert small.dtype == kind and np.array_equal(small[0], labels)


def test_sliders_of_groups_move_with_their_end(models: Models) -> None:
    """Gradio refuses every request with a slider that stands beyond its end."""
    pytest.importorskip("gradio")
    from agglo.lab.playground.page.tabs import SynthesisTab

    for asked, expected in [((25, 20), (STEPS, 7)), ((2, 3), (2, 3))]:
        *_, last = SynthesisTab(models).answer("Bag", 0, 0.5, "average", "none", *asked)
        _, groups, step, attention = last
        assert len(groups) == 2 and (step.maximum, attention.maximum) == (STEPS, 7)
        assert (step.value, attention.value) == expected


def test_what_cannot_be_is_said_and_the_others_are_drawn(models: Models) -> None:
    chosen = [choose("tomesd", "", keep_rate=0.1), choose("atc", "average", keep_rate=1.0)]
    *_, last = draw(models.generator, models.request("Bag", 0), chosen)
    assert last.columns[1].refused is not None and last.columns[1].seconds is None
    assert last.columns[2].seconds is not None and last.done == 1 and last.is_finished


def test_a_visitor_who_leaves_ends_the_work(models: Models) -> None:
    looks = draw(models.generator, models.request("Bag", 0), CHOSEN)
    next(looks)
    looks.close()  # type: ignore[attr-defined]
    with models.generator.use() as generator:  # free again, and dense
        assert agglo.report(generator.reduced) is None


@pytest.mark.parametrize(("what", "seed", "names"), [("Hat", 0, "class"), ("Bag", 0.5, "seed"), ("Bag", -1, "seed")])
def test_requests_are_checked(models: Models, what: str, seed: float, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        list(draw(models.generator, models.request(what, seed), CHOSEN))


def test_a_pipeline_without_a_callback_tells_its_steps_by_its_model() -> None:
    """DiT's takes classes and has no callback."""
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    from agglo.lab.tasks.synthesis.evaluation.generators import _telling

    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    transformer = DiTTransformer2DModel(**shape, patch_size=2, out_channels=4, num_embeds_ada_norm=10)
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4)
    pipeline = DiTPipeline(transformer, vae, DDIMScheduler())
    steps: list[int] = []
    with _telling(pipeline, lambda step, image: steps.append(step)) as arguments:
        pipeline([1], num_inference_steps=3, guidance_scale=1.0, **arguments)
    assert arguments == {} and steps == [1, 2, 3]
    pipeline([1], num_inference_steps=1, guidance_scale=1.0)
    assert steps == [1, 2, 3]  # nobody listens any more


def test_the_last_look_is_the_image() -> None:
    seen = []
    [image] = EmbeddedGenerator(steps=2)([Models().request("Sneaker", 5)], lambda step, look: seen.append((step, look)))
    assert [step for step, _ in seen] == [1, 2] and np.array_equal(seen[-1][1], image)
