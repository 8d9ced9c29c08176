"""The generator in the package makes clothes of the class it is asked for, and is as good as its log says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import agglo
from agglo.embedded import generator as embedded
from agglo.embedded.classifier import IMAGES
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.tasks.synthesis.evaluation.features import ClassifierFeatures
from agglo.lab.tasks.synthesis.evaluation.fid import Statistics, frechet_distance
from agglo.lab.tasks.synthesis.evaluation.generators import pil_images
from agglo.lab.tasks.synthesis.training.trainer import Generation, GeneratorSettings
from agglo.lab.training.batches import Share

pytest.importorskip("diffusers")
LOG = Path(__file__).parents[2] / "results" / "training" / "embedded-generator" / "log.csv"
CLASSES = [label for label in range(10) for _ in range(6)]


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return embedded.sample(embedded.trained(), CLASSES, range(len(CLASSES)), steps=12)


def test_it_is_small() -> None:
    assert embedded.WEIGHTS.stat().st_size < 4_000_000
    assert sum(parameter.numel() for parameter in embedded.trained().parameters()) < 1_000_000


def test_the_classifier_sees_the_classes_that_were_asked_for(images: torch.Tensor) -> None:
    classifier = ClassifierFeatures()
    with torch.no_grad():
        found = classifier.model.head(classifier(pil_images(images))).argmax(dim=1)
    assert (found == torch.tensor(CLASSES)).float().mean() > 0.7  # a tenth by chance


def test_images_are_far_nearer_to_real_ones_than_noise_is(images: torch.Tensor) -> None:
    features = ClassifierFeatures()
    real, _ = read_split(IMAGES, "val")
    reference = Statistics.of(features(pil_images(torch.from_numpy(real[:300].copy())[:, None])).numpy())
    found = Statistics.of(features(pil_images(images)).numpy())
    noise = torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noisy = Statistics.of(features(pil_images(noise)).numpy())
    assert frechet_distance(reference, found) < frechet_distance(reference, noisy) / 4


def test_the_loss_is_that_of_its_log(tmp_path: Path) -> None:
    """The packaged images are those that the run was judged by; its weights are rounded to half precision here."""
    for path in IMAGES.glob("t10k-*"):
        for name in (path.name, path.name.replace("t10k", "train")):
            (tmp_path / name).symlink_to(path)
    task = Generation(GeneratorSettings(), tmp_path, Share(8, 1, 1, 0))
    with LOG.open() as log:
        promised = min(float(row["best_metric"]) for row in csv.DictReader(log))
    with torch.no_grad():
        assert task.evaluate(embedded.trained())["loss"] == pytest.approx(promised, rel=0.01)


@pytest.mark.parametrize("method", ["atc", "tomesd"])
def test_keep_rate_one_makes_the_same_pictures(method: str) -> None:
    model = embedded.trained()
    dense = embedded.sample(model, [1, 7], [3, 4], steps=4)
    agglo.apply(model, method, keep_rate=1.0)
    reduced = embedded.sample(model, [1, 7], [3, 4], steps=4)
    assert (dense.int() - reduced.int()).abs().max() <= 1
    agglo.remove(model)
    assert torch.equal(embedded.sample(model, [1, 7], [3, 4], steps=4), dense)
