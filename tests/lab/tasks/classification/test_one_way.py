"""What several commands do, they do in one way: images are prepared alike, and weights are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from agglo.lab.evaluation.configs import configs_of
from agglo.lab.tasks.classification.evaluation import figures, grid
from agglo.lab.tasks.classification.training.trainer import finetune
from agglo.models.opening import ModelSpec, build
from agglo.patch import apply
from tests.support.fashion import plain, write_fashion

timm = pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file of weights that was read."""
    found: list[str] = []
    usual = safetensors.torch.load_file

    def load_file(path: Any, *rest: Any, **more: Any) -> dict[str, Tensor]:
        found.append(Path(path).name)
        return usual(path, *rest, **more)

    monkeypatch.setattr(safetensors.torch, "load_file", load_file)
    return found


def save_model(path: Path, name: str, method: str | None = None, **options: Any) -> Path:
    torch.manual_seed(0)
    model = build(ModelSpec(name, options=options))
    if method is not None:
        apply(model, method, keep_rate=0.5)
    safetensors.torch.save_file(model.state_dict(), path)
    return path


def test_visualize_and_evaluate_show_a_model_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = tmp_path / "val" / "a" / "photo.png"
    photo.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((300, 200)).save(photo)
    checkpoint = save_model(tmp_path / "w.safetensors", "test_vit", num_classes=1)
    spec = ModelSpec("test_vit", checkpoint)
    seen: list[Tensor] = []

    def noting(spec: ModelSpec, *rest: Any) -> Any:
        model = build(spec, *rest)
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        return model

    for module in (grid, figures):
        monkeypatch.setattr(module, "build", noting)
    configs = configs_of(["atc"], keep_rates=[0.5])
    grid.run(grid.EvaluationSettings(spec, tmp_path, configs, dense=False, workers=0))
    evaluated = len(seen)
    figures.visualize(spec, [photo], configs)
    assert len(seen) > evaluated > 0
    assert all(inputs.shape == (1, 3, 160, 160) and torch.equal(inputs, seen[0]) for inputs in seen)


def test_evaluation_and_training_read_the_weights_once(tmp_path: Path, reads: list[str]) -> None:
    data = write_fashion(tmp_path / "data")
    checkpoint = save_model(tmp_path / "w.safetensors", "agglo_test_vit", "dynamicvit")
    configs = configs_of(["dynamicvit"], keep_rates=[0.5])
    report = grid.run(grid.EvaluationSettings(ModelSpec("agglo_test_vit", checkpoint), data, configs, workers=0))
    assert all("top1" in result for result in report["results"]) and reads == ["w.safetensors"]
    start = {"checkpoint": str(checkpoint), "from_scratch": False, "head_std": 2e-5}
    finetune(plain(epochs=1, method="dynamicvit", keep_rate=0.5, **start), data, tmp_path / "run")
    assert reads == ["w.safetensors"] * 2
