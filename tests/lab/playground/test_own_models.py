"""Models of the user's own on the page: of every library, and a pipeline of diffusers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agglo
from agglo.lab.cli import main
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.models import Models
from agglo.lab.playground.settings import choose
from agglo.lab.playground.synthesis import draw
from agglo.lab.playground.tokens import compare, open_classifier
from agglo.lab.tasks.synthesis.evaluation.grid import panel_pixels
from agglo.models.opening import ModelSpec
from agglo.models.zero_shot import Prompts
from tests.support import tiny_models
from tests.support.diffusion import save_prompted_pipeline
from tests.support.playground import Played, client, played

open_clip = pytest.importorskip("open_clip")
diffusers = pytest.importorskip("diffusers")

PHOTO = chosen_image("example:pagoda")
NAMES = ("tench", "tree frog", "hen")
HALF = choose("atc", keep_rate=0.5)


def answers(spec: ModelSpec) -> tuple[dict[str, float], dict[str, float]]:
    """Classes and probabilities by the page, dense and reduced."""
    found = compare(open_classifier(spec), PHOTO, [HALF])
    [side] = found.sides
    assert side.counts[-1] < found.tokens
    return dict(found.dense.top), dict(side.top)


@torch.inference_mode()
def probabilities(model: Any, inputs: torch.Tensor, texts: torch.Tensor) -> dict[str, float]:
    return dict(zip(NAMES, model.get_logits(inputs, texts)[0][0].softmax(-1).tolist(), strict=True))


def test_prompts_of_open_clip(tmp_path: Path) -> None:
    name = f"local-dir:{tiny_models.open_clip_folder(tmp_path)}"
    own, _, prepare = open_clip.create_model_and_transforms(name)
    own.eval()
    texts = open_clip.get_tokenizer(name)([f"a photo of a {each}." for each in NAMES])
    inputs = prepare(PHOTO)[None]
    dense, reduced = answers(ModelSpec(f"open_clip:{name}", prompts=Prompts(NAMES)))
    assert dense == pytest.approx(probabilities(own, inputs, texts), abs=1e-3)
    agglo.apply(own, "atc", keep_rate=0.5)
    assert reduced == pytest.approx(probabilities(own, inputs, texts), abs=1e-3)


def test_an_image_tower_without_classes_has_groups_and_no_answers(tmp_path: Path) -> None:
    opened = open_classifier(ModelSpec(f"open_clip:local-dir:{tiny_models.open_clip_folder(tmp_path)}"))
    found = compare(opened, PHOTO, [HALF])
    [side] = found.sides
    assert side.stages and opened.classes is None and not found.dense.top


@pytest.mark.parametrize("given", ["--zero-shot", "--class-names=f"])
def test_settings_of_a_model_without_one_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio")
    assert main(["play", given]) == 2
    said = capsys.readouterr().err
    assert given.split("=")[0] in said and "--model" in said


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_prompted_pipeline(tmp_path_factory.mktemp("prompted"))


def test_a_pipeline_draws_what_diffusers_draws(pipeline: Path) -> None:
    """Dense, and with the line of Python that the page shows."""
    steps = 3
    models = Models(pipeline=str(pipeline), steps=steps)
    own = diffusers.StableDiffusionPipeline.from_pretrained(pipeline, safety_checker=None)
    own.set_progress_bar_config(disable=True)
    for config in (None, choose("tomesd", keep_rate=0.5), HALF):
        with models.generator.use() as generator:
            drawn = draw(generator, models.request("a cat", 7), config)
        eval(drawn.line, {"agglo": agglo, "model": own})
        seed = torch.Generator().manual_seed(7)
        image = own("a cat", num_inference_steps=steps, guidance_scale=7.5, generator=seed).images[0]
        assert drawn.image is not None and np.array_equal(drawn.image, panel_pixels(image)), drawn.title
        assert bool(drawn.steps) == (config is not None)


@pytest.fixture(scope="module")
def page(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    pytest.importorskip("gradio_client")
    folder = tmp_path_factory.mktemp("own")
    clip = tiny_models.open_clip_folder(tmp_path_factory.mktemp("clip"))
    (folder / "names.txt").write_text("\n".join(NAMES), encoding="utf-8")
    model = f"open_clip:local-dir:{clip}"
    classes = ("--model", model, "--zero-shot", "--class-names", str(folder / "names.txt"))
    with played(folder / "play", *classes, "--pipeline", str(pipeline), "--steps", "2") as running:
        yield running


def test_the_page_shows_them_and_names_no_folder(page: Played, pipeline: Path) -> None:
    ask = client(page.address).predict
    tokens = ask("example:pagoda", 0.5, "atc", "average", "tome", "average", api_name="/tokens")
    drawn = ask("a dog", 0, 0.5, "average", "none", api_name="/synthesis")
    assert all(name in tokens for name in NAMES) and "refused" not in tokens
    assert drawn.count("data-labels") == 4
    with urllib.request.urlopen(page.address + "config") as answer:
        config = answer.read().decode()
    assert "clip" in config and "local-dir" not in config
    for text in (tokens, drawn, config):
        assert str(pipeline.parent) not in text and str(page.work.parent.parent) not in text
