"""Pictures of a diffusion model: what the library draws, step by step."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

import agglo
from agglo.drawing.groups import first_members
from agglo.embedded import generator as embedded
from agglo.playground.lending import Lent
from agglo.playground.models import Models, Wanted
from agglo.playground.settings import choose_diffusion
from agglo.playground.synthesis import Drawn, _on_grid, draw
from agglo.synthesis.evaluation.generators import EmbeddedGenerator, Generator
from agglo.synthesis.evaluation.sheets import panel_pixels

pytest.importorskip("diffusers")
STEPS = 4
WAYS = [choose_diffusion("tome", "average", 0.5), choose_diffusion("atc", "single", 0.5)]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(Wanted(steps=STEPS))


def drawn(models: Models, seed: int = 3) -> list[Drawn]:
    return list(draw(models.generator, models.request("Bag", seed), WAYS))


def by_the_library(seed: int, **arguments: object) -> np.ndarray:
    model = embedded.trained()
    if arguments:
        agglo.apply(model, **arguments)
    image = embedded.sample(model, [8], [seed], steps=STEPS)
    from PIL import Image

    return panel_pixels(Image.fromarray(image[0, 0].numpy()))


def test_each_way_is_what_the_library_draws(models: Models) -> None:
    last = drawn(models)[-1]
    expected = [
        by_the_library(3),
        by_the_library(3, method="tome", keep_rate=0.5),
        by_the_library(3, method="atc", keep_rate=0.5, linkage="single"),
    ]
    for column, pixels in zip(last.columns, expected, strict=True):
        assert column.picture is not None and np.array_equal(column.picture, pixels), column.title
    dense, tome, atc = last.columns
    assert dense.difference is None and tome.difference == pytest.approx(
        np.abs(expected[1].astype(int) - expected[0].astype(int)).mean()
    )
    assert atc.tokens == [128] * 8 and dense.tokens == []


def test_progress_goes_from_nothing_to_all(models: Models) -> None:
    looks = drawn(models)
    shares = [look.done for look in looks]
    assert shares == sorted(shares) and shares[0] == pytest.approx(1 / (3 * STEPS)) and shares[-1] == 1
    assert [look.columns[0].done for look in looks[:STEPS]] == [1, 2, 3, 4]
    assert looks[0].columns[1].picture is None and looks[0].columns[0].picture is not None


def test_groups_of_every_step_and_self_attention(models: Models) -> None:
    atc = drawn(models)[-1].columns[2]
    assert len(atc.groups) == STEPS and all(list(groups) == list(range(8)) for groups in atc.groups)
    model = agglo.apply(embedded.trained(), "atc", keep_rate=0.5, linkage="single")
    with agglo.trace(model, passes=STEPS) as trace:
        embedded.sample(model, [8], [3], steps=STEPS)
    for step in range(STEPS):
        for entry in trace.passes[step]:
            expected = first_members(entry.total.labels)[0].reshape(16, 16)
            assert np.array_equal(atc.groups[step][entry.block], expected)
    assert atc.canvas is not None and atc.canvas.shape[0] % 16 == 0


def test_what_is_kept_for_a_visitor_is_small(models: Models) -> None:
    last = drawn(models)[-1]
    kept = last.kept
    assert [way.title for way in kept] == [column.title for column in last.columns[1:]]
    for way in kept:
        grids = [grid for groups in way.groups for grid in groups.values()]
        assert len(grids) == STEPS * 8 and {grid.dtype for grid in grids} == {np.dtype(np.int16)}  # of 256 tokens
        assert {each.name for each in fields(way)} == {"title", "canvas", "groups"}


@pytest.mark.parametrize(("count", "kind"), [(128, np.int8), (129, np.int16), (32768, np.int16), (32769, np.int32)])
def test_labels_are_as_small_as_they_can_be(count: int, kind: type) -> None:
    labels = np.arange(count)
    labels[0] = -1
    small = _on_grid(labels, (count, 1))
    assert small.dtype == kind and np.array_equal(small[0], labels)


def test_sliders_of_groups_move_with_their_end(models: Models) -> None:
    """One that stands beyond is refused by Gradio, with everything that is asked with it."""
    pytest.importorskip("gradio")
    from agglo.playground.page.tabs import SynthesisTab

    for asked, expected in [((25, 20), (STEPS, 7)), ((2, 3), (2, 3))]:
        *_, last = SynthesisTab(models).answer("Bag", 0, 0.5, "average", "none", *asked)
        _, kept, step, attention = last
        assert len(kept) == 2 and (step.maximum, attention.maximum) == (STEPS, 7)
        assert (step.value, attention.value) == expected


def test_nothing_merged_leaves_no_groups_to_look_at(models: Models) -> None:
    ways = [choose_diffusion("atc", "average", 1.0)]
    last = list(draw(models.generator, models.request("Bag", 0), ways))[-1]
    assert last.columns[1].seconds is not None
    for way in last.kept:
        assert all(groups for groups in way.groups)


def test_what_cannot_be_is_said_and_the_others_are_drawn(models: Models) -> None:
    ways = [choose_diffusion("tome", "average", 0.1), choose_diffusion("atc", "average", 0.1)]
    last = list(draw(models.generator, models.request("Bag", 0), ways))[-1]
    assert last.columns[1].refused is not None and "64 in all" in last.columns[1].refused
    assert last.columns[2].seconds is not None and last.done == 1


def test_a_visitor_who_leaves_ends_the_work(models: Models) -> None:
    looks = draw(models.generator, models.request("Bag", 0), WAYS)
    next(looks)
    looks.close()  # type: ignore[attr-defined]
    with models.generator.borrowed() as generator:  # given back
        assert agglo.reduction(generator.reduced) is None


def test_requests_are_checked(models: Models) -> None:
    for what, seed, says in [("Hat", 0, "accepted: T-shirt"), ("Bag", 0.5, "whole number"), ("Bag", -1, "must lie in")]:
        with pytest.raises(ValueError, match=says):
            list(draw(models.generator, models.request(what, seed), WAYS))


def test_a_pipeline_without_a_callback_tells_its_steps_by_its_model() -> None:
    """DiT's takes classes and has no callback."""
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    transformer = DiTTransformer2DModel(**shape, patch_size=2, out_channels=4, num_embeds_ada_norm=10)
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4)
    pipeline = DiTPipeline(transformer, vae, DDIMScheduler())
    steps: list[int] = []
    from agglo.synthesis.evaluation.generators import _telling

    with _telling(pipeline, lambda step, picture: steps.append(step)) as arguments:
        pipeline([1], num_inference_steps=3, guidance_scale=1.0, **arguments)
    assert arguments == {} and steps == [1, 2, 3]
    pipeline([1], num_inference_steps=1, guidance_scale=1.0)
    assert steps == [1, 2, 3]  # nobody listens any more


def test_the_last_look_is_the_picture() -> None:
    seen = []
    generator: Lent[Generator] = Lent(lambda: EmbeddedGenerator(steps=2))
    with generator.borrowed() as one:
        [image] = one([Models().request("Sneaker", 5)], lambda step, look: seen.append((step, look)))
    assert [step for step, _ in seen] == [1, 2]
    assert np.array_equal(seen[-1][1], image)
