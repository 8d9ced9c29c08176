"""How images are prepared, against the transform of each library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agglo.lab.tasks.classification.data.transforms import inputs_for
from agglo.models.inputs import Inputs, evaluation_transform
from agglo.models.libraries import own_inputs
from agglo.models.opening import ModelSpec, build
from tests.support import tiny_models
from tests.support.tiny_models import SIDE

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
open_clip = pytest.importorskip("open_clip")
Image = pytest.importorskip("PIL.Image")

SIZES = [(301, 200), (97, 211), (30, 25)]


def photograph(size: tuple[int, int]) -> Any:
    pixels = np.random.default_rng(size[0]).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def levels_off(found: Any, expected: Any, inputs: Inputs) -> float:
    """The largest difference of two prepared images, in levels of 255."""
    return float(((found - expected) * torch.tensor(inputs.std).view(-1, 1, 1) * 255).abs().max())


def test_timm(tmp_path: Path) -> None:
    model = build(ModelSpec(f"local-dir:{tiny_models.timm_folder(tmp_path)}"))
    own = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    inputs = inputs_for(model, frame="model")
    assert (inputs.crop, inputs.interpolation, inputs.mean) == (0.8, "bilinear", (0.4, 0.5, 0.6))
    for size in SIZES:
        assert torch.equal(evaluation_transform(inputs)(photograph(size)), own(photograph(size)))


@pytest.mark.parametrize("tag", ["vit_l_16:IMAGENET1K_V1", "vit_b_16:IMAGENET1K_SWAG_E2E_V1"])
def test_torchvision(tag: str) -> None:
    name, _, weights = tag.partition(":")
    own = torchvision.models.get_model_weights(name)[weights].transforms()
    with torch.device("meta"):
        model = build(ModelSpec(f"torchvision:{tag}", from_scratch=True))
    inputs = inputs_for(model, "imagenet")
    assert inputs.image_size == (own.crop_size[0],) * 2
    for size in SIZES:
        assert levels_off(evaluation_transform(inputs)(photograph(size)), own(photograph(size)), inputs) < 1e-3


PROCESSORS = {
    "squash": {},
    "squash, then crop": {"size": {"height": 56, "width": 56}, "crop_size": SIDE, "do_center_crop": True},
    "short side, then crop": {"size": {"shortest_edge": 60}, "crop_size": SIDE, "do_center_crop": True, "resample": 3},
    "no normalisation": {"do_normalize": False},
    "another scale": {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_transformers(tmp_path: Path, kind: str) -> None:
    cls = transformers.BitImageProcessor if "crop" in kind else transformers.ViTImageProcessor
    tiny_models.vit_folder(tmp_path)
    given = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    own = cls(**{**given, **PROCESSORS[kind]})
    own.save_pretrained(tmp_path)
    model = build(ModelSpec(f"hf:{tmp_path}"))
    inputs = inputs_for(model, "folder")
    for size in ((300, 200), (96, 212), (64, 64)):
        found = evaluation_transform(inputs)(photograph(size))
        expected = own(photograph(size), return_tensors="pt")["pixel_values"][0]
        # transformers resizes tensors, agglo PIL's images: roundings differ.
        assert found.shape == expected.shape and levels_off(found, expected, inputs) < 3, size


def test_a_processor_that_does_something_else_is_refused(tmp_path: Path) -> None:
    tiny_models.vit_folder(tmp_path)
    size = {"height": SIDE, "width": SIDE}
    for other in (
        transformers.ConvNextImageProcessor(size={"shortest_edge": SIDE}, crop_pct=0.5),
        transformers.EfficientNetImageProcessor(size=size, rescale_offset=True),
        transformers.ViTImageProcessor(size={"shortest_edge": SIDE}),  # without a crop: images of many sizes
        transformers.ViTImageProcessor(do_resize=False),
    ):
        other.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="ImageProcessor"):
            build(ModelSpec(f"hf:{tmp_path}"))


def test_an_object_of_transformers_remembers_the_folder_that_it_came_from(tmp_path: Path) -> None:
    tiny_models.vit_folder(tmp_path)
    own = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    assert own_inputs(own).mean == (0.4, 0.5, 0.6)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="image processor"):
        build(ModelSpec(f"hf:{tmp_path}"))


def test_open_clip(tmp_path: Path) -> None:
    folder = tiny_models.open_clip_folder(tmp_path)
    for name in (tiny_models.OPEN_CLIP, f"local-dir:{folder}"):
        own, _, prepare = open_clip.create_model_and_transforms(name)
        inputs = inputs_for(build(ModelSpec(f"open_clip:{name}")))
        for size in SIZES:
            assert torch.equal(evaluation_transform(inputs)(photograph(size)), prepare(photograph(size)))
        assert own_inputs(own) == inputs


def test_data_that_is_never_cropped_is_not_for_any_library(tmp_path: Path) -> None:
    model = build(ModelSpec(f"hf:{tiny_models.contrastive_folder(tmp_path, 'clip')}"))
    assert not inputs_for(model, "imagenet").squash
    assert inputs_for(model, "coco").squash and inputs_for(model, "coco").crop == 1
    assert not inputs_for(model, "coco", "model").squash
    with pytest.raises(ValueError, match="Linear"):
        own_inputs(torch.nn.Linear(2, 2))
