"""The detector in the package: how it gets there, and what is said while it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import agglo
from agglo import embedded
from agglo.embedded.classifier import IMAGES
from agglo.lab.data.fashion_mnist import CLASSES
from agglo.lab.tasks.detection.data import make_scenes, transforms_for
from agglo.lab.tasks.detection.evaluation.average_precision import DetectionBatches, evaluate
from agglo.lab.tasks.detection.specs import DetectorSpec, open_detector
from agglo.lab.tasks.detection.training.settings import RECIPES
from agglo.utils.files import save_weights
from tools.embed import embed_detector, keep_log

LARGEST = 4_000_000  # bytes


@pytest.fixture(scope="module")
def spec() -> DetectorSpec:
    settings, _ = RECIPES.load("miniature").resolve({"class_token": True})
    return settings.spec(list(CLASSES))


@pytest.fixture
def run(tmp_path: Path, spec: DetectorSpec) -> Path:
    """The folder of a finished run, of a detector that has not learned anything."""
    torch.manual_seed(0)
    folder = tmp_path / "run"
    save_weights(folder / "last" / "model.safetensors", spec.build(start=True).state_dict(), spec.about())
    (folder / "log.csv").write_text("epoch,box_AP\n1,0.0\n")
    (folder / "settings.json").write_text(json.dumps({"settings": {"epochs": 1}, "data": "/somewhere"}))
    (folder / "result.json").write_text("{}")
    return folder


def test_a_run_is_embedded(run: Path, spec: DetectorSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "detector.safetensors"
    embed_detector(run, weights)
    keep_log(run, tmp_path / "log")
    assert weights.stat().st_size < LARGEST
    assert "data" not in json.loads((tmp_path / "log" / "settings.json").read_text())
    monkeypatch.setattr(embedded, "DETECTOR_WEIGHTS", weights)
    opened = open_detector("embedded")
    assert opened.spec == spec and opened.name == "miniature" and opened.learned == {}
    trained = open_detector(str(run / "last" / "model.safetensors")).model
    assert all(value.dtype != torch.float16 for value in opened.model.state_dict().values())
    torch.testing.assert_close(dict(opened.model.state_dict()), dict(trained.state_dict()), rtol=1e-3, atol=1e-6)


def test_what_cannot_be_embedded(run: Path, tmp_path: Path) -> None:
    (run / "result.json").unlink()
    with pytest.raises(ValueError, match="holds no finished run"):
        embed_detector(run, tmp_path / "detector.safetensors")


def test_it_finds_garments_and_needs_its_tokens(spec: DetectorSpec) -> None:
    """On scenes of the garments that come with the package, which it never saw."""
    assert embedded.DETECTOR_WEIGHTS.stat().st_size < LARGEST
    opened = open_detector("embedded")
    assert opened.spec == spec
    images = DetectionBatches(
        make_scenes(IMAGES, 10, 5, "val"), transforms_for(opened.spec.image_size)[1], batch_size=8
    )
    found = {}
    for name, choices in {
        "dense": {"keep_rate": 1.0},
        "atc": {"keep_rate": 0.5},
        "one token": {"schedule": agglo.Counts((1,), blocks=(0,))},
    }.items():
        agglo.apply(opened.model, **choices)
        found[name] = evaluate(opened.model, images)
    for kind in ("box_AP", "mask_AP"):
        assert found["dense"][kind] > 20
        assert found["atc"][kind] > 0.6 * found["dense"][kind]
        assert found["one token"][kind] < 2 / 3 * found["dense"][kind]
