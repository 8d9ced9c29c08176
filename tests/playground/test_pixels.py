"""The page and `agglo visualize` show the embedded classifier the pixels that `agglo evaluate` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from agglo.classification.evaluation import grid, pictures
from agglo.embedded import classifier as embedded
from agglo.experiments.fashion_mnist import read_split
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.variants import variants_of
from agglo.methods import create
from agglo.playground.classifiers import EMBEDDED, Classifier, open_classifier
from agglo.playground.examples import picture
from agglo.playground.settings import choose
from agglo.playground.tokens import compare

BOOT = 0  # in the test set


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that models were shown which commands build from now on."""
    found: list[Tensor] = []

    def noting(spec: ModelSpec, *rest: Any) -> Any:
        model = build(spec, *rest)
        model.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
        return model

    for module in (grid, pictures):
        monkeypatch.setattr(module, "build", noting)
    return found


@pytest.fixture
def evaluated(seen: list[Tensor]) -> Tensor:
    """The first picture of the test set as an evaluation shows it, (1, 1, 28, 28)."""
    grid.run(grid.EvaluationSettings(EMBEDDED, embedded.IMAGES, [], dense=True, images=2, workers=0))
    first = seen[0][:1]
    seen.clear()
    return first


def test_the_page_shows_what_an_evaluation_does(classifier: Classifier, evaluated: Tensor) -> None:
    inputs, shown = classifier.prepare(picture("example:boot"))
    assert torch.equal(inputs, evaluated)
    images, _ = read_split(embedded.IMAGES, "val")
    assert np.array_equal(shown[0, 0], images[BOOT])
    # Nothing is cut off: what is drawn on the page is the picture of the data set.
    found = compare(classifier, picture("example:boot"), [choose("atc", "average", keep_rate=0.5)])
    assert np.array_equal(found.pixels, np.stack([images[BOOT]] * 3, axis=-1))


@pytest.mark.parametrize("command", ["sheet", "animation"])
def test_visualize_shows_what_an_evaluation_does(
    command: str, evaluated: Tensor, seen: list[Tensor], tmp_path: Path
) -> None:
    images, _ = read_split(embedded.IMAGES, "val")
    Image.fromarray(images[BOOT]).save(tmp_path / "boot.png")
    if command == "sheet":
        pictures.visualize(EMBEDDED, [tmp_path / "boot.png"], variants_of(["atc"], keep_rates=[0.5]))
    else:
        pictures.animate(EMBEDDED, tmp_path / "boot.png", create("atc"), keep_rate=0.5)
    assert seen and all(torch.equal(inputs, evaluated) for inputs in seen)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("size", [(28, 28), (640, 37), (30, 500)])
def test_own_photographs_are_made_to_fit(classifier: Classifier, mode: str, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 60).convert("RGB").convert(mode)
    inputs, shown = classifier.prepare(image)
    assert inputs.shape == (1, 1, 28, 28) and shown.shape == (1, 3, 28, 28)


def test_other_models_see_pictures_as_before() -> None:
    own = open_classifier(ModelSpec("test_vit"))
    photo = Image.effect_noise((300, 200), 60).convert("RGB")
    assert own.dataset is None
    assert torch.equal(own.prepare(photo)[0], pictures.prepared(own.model, [photo])[0])
