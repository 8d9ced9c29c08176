"""Whole pipelines: text to image, image to image, inpainting, and what users do with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import agglo
from tests.support.diffusion import diffusers, generate, pipeline, run, unet

IMAGE = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
MASK = (torch.arange(16) < 8).float().expand(1, 1, 16, 16)

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text to image": ("StableDiffusionPipeline", {}, {}),
    "image to image": ("StableDiffusionImg2ImgPipeline", {"image": IMAGE, "strength": 0.9}, {}),
    "inpainting of 9 channels": (
        "StableDiffusionInpaintPipeline",
        {"image": IMAGE, "mask_image": MASK, "strength": 1.0},
        {"in_channels": 9},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pipelines(kind: str) -> None:
    name, given, config = KINDS[kind]
    pipe = pipeline(name, **config)
    dense = generate(pipe, **given)
    assert agglo.apply(pipe, keep_rate=1.0) is pipe
    assert torch.equal(generate(pipe, **given), dense)
    agglo.apply(pipe, keep_rate=0.5, every=2)
    with agglo.trace(pipe) as trace:
        reduced = generate(pipe, **given)
    assert reduced.shape == dense.shape
    assert reduced.isfinite().all()
    assert not torch.equal(reduced, dense)
    assert trace.groupings[0].labels.shape == (2, 64)
    assert torch.equal(generate(pipe, **given), reduced)
    agglo.remove(pipe)
    assert torch.equal(generate(pipe, **given), dense)
    assert type(pipe) is getattr(diffusers, name)


@pytest.mark.parametrize(
    ("size", "half", "method", "options"),
    [
        ((7, 9), (4, 5), "atc", {}),
        ((13, 8), (7, 4), "tomesd", {}),
        ((9, 7), (4, 3), "pool", {"downsample_padding": 0}),  # an odd map loses its last row
    ],
)
def test_any_height_and_width(size: tuple[int, int], half: tuple[int, int], method: str, options: Any) -> None:
    model, inputs = unet(size, **options)
    dense = run(model, inputs)
    agglo.apply(model, method, keep_rate=0.6, max_downsample=2)
    with agglo.trace(model) as trace:
        result = run(model, inputs)
    assert result.shape == dense.shape
    assert {step.grid for step in trace.steps} == {size, half}  # type: ignore[attr-defined]


def test_a_reduced_pipeline_is_copied_and_saved(tmp_path: Any) -> None:
    pipe = agglo.apply(pipeline(), keep_rate=0.5, every=2)
    expected = generate(pipe)
    assert torch.equal(generate(copy.deepcopy(pipe)), expected)
    pipe.unet.save_pretrained(tmp_path)
    thawed = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    dense = agglo.remove(pipe)
    assert type(thawed) is type(dense.unet)
    for key, value in dense.unet.state_dict().items():
        assert torch.equal(thawed.state_dict()[key], value)


def test_a_pipeline_without_a_denoiser() -> None:
    pipe = pipeline()
    pipe.unet = None
    with pytest.raises(agglo.UnsupportedModelError, match="UNet2DConditionModel"):
        agglo.apply(pipe, keep_rate=0.5)


def test_another_pipeline_of_the_same_model() -> None:
    pipe = agglo.apply(pipeline(), keep_rate=0.5)
    other = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    assert other.unet is pipe.unet
    assert agglo.report(other) is not None
    with agglo.trace(other) as trace:
        generate(other, image=IMAGE)
    assert trace.groupings[0].n_groups == 32
    agglo.remove(other)
    assert agglo.report(pipe) is None
