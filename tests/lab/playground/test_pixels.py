"""The page and `agglo visualize` show the embedded classifier the pixels that `agglo evaluate` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from agglo.embedded import classifier as embedded
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.playground.images import chosen_image
from agglo.lab.playground.settings import choose
from agglo.lab.playground.tokens import EMBEDDED, Classifier, compare, open_classifier
from agglo.lab.tasks.classification.evaluation import figures, grid
from agglo.methods import create
from agglo.models.opening import ModelSpec, build

BOOT = 0  # in the test set


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All inputs of models that commands build from now on."""
    found: list[Tensor] = []

    def noting(spec: ModelSpec, *rest: Any) -> Any:
        model = build(spec, *rest)
        model.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
        return model

    for module in (grid, figures):
        monkeypatch.setattr(module, "build", noting)
    return found


@pytest.fixture
def evaluated(seen: list[Tensor]) -> Tensor:
    """The first image of the test set as an evaluation shows it, (1, 1, 28, 28)."""
    grid.run(grid.EvaluationSettings(EMBEDDED, embedded.IMAGES, {}, dense=True, images=2, workers=0))
    first = seen[0][:1]
    seen.clear()
    return first


def test_the_page_shows_what_an_evaluation_does(classifier: Classifier, evaluated: Tensor) -> None:
    boot = chosen_image("example:boot")
    assert torch.equal(classifier.prepare(boot)[0], evaluated)
    # Nothing is cut off: what is drawn on the page is the image of the data set.
    images, _ = read_split(embedded.IMAGES, "val")
    found = compare(classifier, boot, [choose("atc", "average", keep_rate=0.5)])
    assert np.array_equal(found.pixels, np.stack([images[BOOT]] * 3, axis=-1))


def test_visualize_shows_what_an_evaluation_does(evaluated: Tensor, seen: list[Tensor], tmp_path: Path) -> None:
    images, _ = read_split(embedded.IMAGES, "val")
    path = tmp_path / "boot.png"
    Image.fromarray(images[BOOT]).save(path)
    figures.visualize(EMBEDDED, [path], configs_of(["atc"], keep_rates=[0.5]))
    figures.animate(EMBEDDED, path, create("atc"), keep_rate=0.5)
    assert len(seen) > 1 and all(torch.equal(inputs, evaluated) for inputs in seen)


@pytest.mark.parametrize(("mode", "size"), [("1", (28, 28)), ("P", (640, 37)), ("RGBA", (30, 500)), ("CMYK", (90, 90))])
def test_own_photographs_are_made_to_fit(classifier: Classifier, mode: str, size: tuple[int, int]) -> None:
    inputs, shown = classifier.prepare(Image.effect_noise(size, 60).convert("RGB").convert(mode))
    assert inputs.shape == (1, 1, 28, 28) and shown.shape == (1, 3, 28, 28)


def test_other_models_are_of_no_data_set() -> None:
    own = open_classifier(ModelSpec("test_vit"))
    photo = Image.effect_noise((300, 200), 60).convert("RGB")
    assert own.dataset is None
    assert torch.equal(own.prepare(photo)[0], figures.prepared(own.model, [photo])[0])
