"""Pictures are prepared as the study says: checked against Pillow and NumPy alone."""

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
    Normalise,
    evaluation_transform,
    inputs_for,
    train_transform,
)

timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INPUTS = Inputs((224, 224), MEAN, STD)


def photograph(width: int = 300, height: int = 420) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)


def normalised(image: Any) -> torch.Tensor:
    pixels = (np.asarray(image, dtype=np.float64) / 255 - MEAN) / STD
    return torch.from_numpy(pixels).permute(2, 0, 1).float()


def test_evaluation_resizes_to_256_and_crops_224() -> None:
    expected = photograph().resize((256, 358), Image.Resampling.BICUBIC).crop((16, 67, 240, 291))
    torch.testing.assert_close(evaluation_transform(INPUTS)(photograph()), normalised(expected), atol=1e-5, rtol=0)


def test_several_labels_are_evaluated_on_the_whole_squashed_picture() -> None:
    expected = photograph().resize((224, 224), Image.Resampling.BICUBIC)
    found = evaluation_transform(replace(INPUTS, squash=True, crop=1.0))(photograph())
    torch.testing.assert_close(found, normalised(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(224, 224), (192, 160)])
def test_bytes_normalised_later_are_what_the_transform_gives(size: tuple[int, int]) -> None:
    inputs = replace(INPUTS, image_size=size)
    pixels = evaluation_transform(inputs, normalise=False)(photograph())
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, *size)
    torch.testing.assert_close(
        Normalise(inputs.mean, inputs.std)(pixels[None])[0], evaluation_transform(inputs)(photograph())
    )


def test_any_picture_is_prepared_as_imagenets_are() -> None:
    model = timm.create_model("test_vit")
    assert inputs_for(model) == inputs_for(model, "imagenet") == inputs_for(model, "folder")
    with pytest.raises(ValueError, match="dataset='cifar'"):
        inputs_for(model, "cifar")


def test_a_models_own_numbers_and_a_data_sets_protocol() -> None:
    model = timm.create_model("test_vit")
    assert inputs_for(model, "imagenet") == Inputs((160, 160), (0.5,) * 3, (0.5,) * 3, crop=0.875)
    assert inputs_for(model, "coco").squash and inputs_for(model, "nuswide").squash
    assert inputs_for(model, "fashion-mnist").crop == 1
    model.set_input_size(img_size=(96, 128))
    assert inputs_for(model, "folder").image_size == (96, 128)


def test_pictures_take_the_models_colours() -> None:
    grey = Inputs((28, 28), (0.5,), (0.5,), crop=1.0)
    assert evaluation_transform(grey)(photograph()).shape == (1, 28, 28)
    assert evaluation_transform(INPUTS)(photograph().convert("L")).shape == (3, 224, 224)
    found = evaluation_transform(grey)(Image.new("L", (28, 28), 255))
    assert torch.equal(found, torch.ones(1, 28, 28))


@pytest.mark.parametrize("dataset", dataset_names())
def test_training_pictures_have_the_size_and_vary(dataset: str) -> None:
    seed(0)
    grey = dataset == "fashion-mnist"
    inputs = Inputs((28, 28), (0.5,), (0.5,)) if grey else replace(INPUTS, squash=dataset in ("coco", "nuswide"))
    transform = train_transform(inputs, dataset_named(dataset).augmentation)
    found = [transform(photograph()) for _ in range(4)]
    assert all(picture.shape == (len(inputs.mean), *inputs.image_size) for picture in found)
    assert not torch.equal(found[0], found[1])


def seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002 timm draws from it


def test_without_augmentation_several_labels_train_on_what_they_are_evaluated_on() -> None:
    nothing = Augmentation(flip=0.0, randaugment=None, erasing=0.0)
    inputs = replace(INPUTS, squash=True, crop=1.0)
    found = train_transform(inputs, nothing)(photograph())
    torch.testing.assert_close(found, evaluation_transform(inputs)(photograph()), atol=1e-6, rtol=0)


def test_colour_jitter_gives_way_to_randaugment() -> None:
    def steps(augmentation: Augmentation) -> list[str]:
        return [type(step).__name__ for step in train_transform(INPUTS, augmentation).transforms]  # type: ignore[attr-defined]

    assert "ColorJitter" not in steps(Augmentation(colour_jitter=0.3))
    birds = steps(dataset_named("nabirds").augmentation)
    assert "ColorJitter" in birds and "RandAugment" not in birds
    for name in ("coco", "nuswide"):
        of_several = steps(dataset_named(name).augmentation)
        assert "Cutout" in of_several and not {"RandomHorizontalFlip", "RandomErasing"} & set(of_several)


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


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(ValueError, match="crop_pct="):
        replace(INPUTS, crop=1.5)
    with pytest.raises(ValueError, match="must both have 1 value"):
        replace(INPUTS, mean=(0.5, 0.5))
    with pytest.raises(ValueError, match="randaugment="):
        train_transform(Inputs((28, 28), (0.5,), (0.5,)), Augmentation())
