"""The generator in the package makes clothes of the class it is asked for, and can be reduced."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

import agglo
from agglo.embedded import classifier
from agglo.embedded import generator as embedded
from agglo.lab.tasks.synthesis.evaluation.fid import classifier_features
from agglo.lab.tasks.synthesis.evaluation.generators import pil_images

pytest.importorskip("diffusers")
CLASSES = [label for label in range(10) for _ in range(3)]


def test_it_is_small_and_the_classifier_sees_the_classes_that_were_asked_for() -> None:
    assert embedded.WEIGHTS.stat().st_size < 4_000_000
    images = embedded.sample(embedded.trained(), CLASSES, range(len(CLASSES)), steps=8)
    head: Any = timm.create_model(classifier.NAME, pretrained=True).get_classifier().requires_grad_(False)
    found = head(classifier_features()(pil_images(images))).argmax(dim=1)
    assert (found == torch.tensor(CLASSES)).float().mean() > 0.7  # a tenth by chance


def test_keep_rate_one_makes_the_same_images() -> None:
    model = embedded.trained()
    dense = embedded.sample(model, [1, 7], [3, 4], steps=2)
    for method in ("atc", "tomesd"):
        agglo.apply(model, method, keep_rate=1.0)
        reduced = embedded.sample(model, [1, 7], [3, 4], steps=2)
        assert (dense.int() - reduced.int()).abs().max() <= 1
    agglo.remove(model)
    assert torch.equal(embedded.sample(model, [1, 7], [3, 4], steps=2), dense)
