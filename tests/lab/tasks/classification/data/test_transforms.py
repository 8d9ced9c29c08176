"""Images are prepared as the study says: checked against Pillow and NumPy alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agglo.lab.tasks.classification.data import dataset_named, dataset_names
from agglo.lab.tasks.classification.data.transforms import (
    Augmentation,
    Cutout,
    Inputs,
    evaluation_transform,
    inputs_for,
    train_transform,
)

timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INPUTS = Inputs((224, 224), MEAN, STD)
GREY = Inputs((28, 28), (0.5,), (0.5,), crop=1.0)


def photograph(width: int = 300, height: int = 420) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)


def normalised(image: Any) -> torch.Tensor:
    pixels = (np.asarray(image, dtype=np.float64) / 255 - MEAN) / STD
    return torch.from_numpy(pixels).permute(2, 0, 1).float()


def seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002 timm draws from it


def test_evaluation_resizes_to_256_and_crops_224() -> None:
    expected = photograph().resize((256, 358), Image.Resampling.BICUBIC).crop((16, 67, 240, 291))
    torch.testing.assert_close(evaluation_transform(INPUTS)(photograph()), normalised(expected), atol=1e-5, rtol=0)
    pixels = evaluation_transform(INPUTS, normalise=False)(photograph())
    assert pixels.dtype == torch.uint8
    torch.testing.assert_close(INPUTS.normalise(pixels[None])[0], evaluation_transform(INPUTS)(photograph()))


def test_several_labels_are_evaluated_on_the_whole_squashed_image() -> None:
    expected = photograph().resize((224, 224), Image.Resampling.BICUBIC)
    inputs = replace(INPUTS, squash=True, crop=1.0)
    torch.testing.assert_close(evaluation_transform(inputs)(photograph()), normalised(expected), atol=1e-5, rtol=0)
    without_augmentation = train_transform(inputs, Augmentation(flip=0.0, randaugment=None, erasing=0.0))
    torch.testing.assert_close(without_augmentation(photograph()), normalised(expected), atol=1e-5, rtol=0)


def test_a_models_own_numbers_and_a_data_sets_protocol() -> None:
    model = timm.create_model("test_vit")
    assert inputs_for(model) == inputs_for(model, "imagenet") == Inputs((160, 160), (0.5,) * 3, (0.5,) * 3, crop=0.875)
    assert inputs_for(model, "coco").squash and inputs_for(model, "nuswide").squash
    assert inputs_for(model, "fashion-mnist").crop == 1
    model.set_input_size(img_size=(96, 128))
    assert inputs_for(model, "folder").image_size == (96, 128)


def test_images_take_the_models_colours() -> None:
    assert evaluation_transform(GREY)(photograph()).shape == (1, 28, 28)
    assert evaluation_transform(INPUTS)(photograph().convert("L")).shape == (3, 224, 224)
    with pytest.raises(ValueError, match="randaugment="):
        train_transform(GREY, Augmentation())


@pytest.mark.parametrize("dataset", dataset_names())
def test_training_images_have_the_size_and_vary(dataset: str) -> None:
    seed(0)
    grey = dataset == "fashion-mnist"
    inputs = GREY if grey else replace(INPUTS, squash=dataset in ("coco", "nuswide"))
    transform: Any = train_transform(inputs, dataset_named(dataset).augmentation)
    found = [transform(photograph()) for _ in range(4)]
    assert all(image.shape == (len(inputs.mean), *inputs.image_size) for image in found)
    assert not torch.equal(found[0], found[1])
    steps = {type(step).__name__ for step in transform.transforms}
    several = dataset in ("coco", "nuswide")
    assert ("Cutout" in steps) is several is not ("RandomHorizontalFlip" in steps)
    assert ("ColorJitter" in steps) is (dataset == "nabirds")
    assert ("RandAugment" in steps) is (dataset not in ("nabirds", "fashion-mnist"))
    assert ("RandomErasing" in steps) is (dataset in ("imagenet", "folder", "nabirds"))


def test_cutout_fills_one_rectangle_of_half_the_side_and_clips_it() -> None:
    sides = set()
    for value in range(40):
        seed(value)
        blank = Image.new("RGB", (40, 24), (1, 2, 3))
        changed = (np.asarray(Cutout()(blank)) != (1, 2, 3)).any(axis=2)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert np.asarray(blank).max() == 3
        sides.add((len(columns), len(rows)))
    assert max(width for width, _ in sides) == 20 and max(height for _, height in sides) == 12
    assert min(width for width, _ in sides) < 20 and min(height for _, height in sides) < 12
