"""What several commands do, they do in one way: pictures are prepared alike, and weights are read once."""

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
from tests.support.killing import require_same_files

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


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (160, 160)])
def test_visualize_and_evaluate_show_a_model_the_same_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    photo = tmp_path / "val" / "a" / "photo.png"
    photo.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(photo)
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


def test_a_grey_model_can_be_shown_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (200, 10, 10)).save(tmp_path / "red.png")
    spec = ModelSpec("agglo_fashion_vit", pretrained=True)
    sheet = figures.visualize(spec, [tmp_path / "red.png"], configs_of(["atc"], keep_rates=[0.5]), scale=4)
    assert sheet.width > 4 * 28 * 4


@pytest.mark.parametrize("method", [None, "dynamicvit"])
def test_an_evaluation_reads_the_weights_once(tmp_path: Path, reads: list[str], method: str | None) -> None:
    data = write_fashion(tmp_path / "data")
    checkpoint = save_model(tmp_path / "w.safetensors", "agglo_test_vit", method)
    configs = configs_of([method or "atc"], keep_rates=[0.5])
    report = grid.run(grid.EvaluationSettings(ModelSpec("agglo_test_vit", checkpoint), data, configs, workers=0))
    assert all("top1" in result for result in report["results"]) and reads == ["w.safetensors"]


def test_training_reads_the_weights_once(tmp_path: Path, reads: list[str]) -> None:
    data = write_fashion(tmp_path / "data")
    start = str(save_model(tmp_path / "w.safetensors", "agglo_test_vit", "dynamicvit"))
    settings = plain(epochs=1, checkpoint=start, from_scratch=False, method="dynamicvit", keep_rate=0.5, head_std=2e-5)
    finetune(settings, data, tmp_path / "run")
    assert reads == ["w.safetensors"]


def test_two_equal_runs_write_the_same_files(tmp_path: Path) -> None:
    data = write_fashion(tmp_path / "data")
    for name in ("one", "two"):
        finetune(plain(epochs=1), data, tmp_path / name)
    files = ("last/model.safetensors", "best/model.safetensors", "last/state.pt")
    require_same_files(tmp_path / "one", tmp_path / "two", files)
    for file in files:
        assert (tmp_path / "one" / file).stat().st_mode == (tmp_path / "one" / "log.csv").stat().st_mode, file
