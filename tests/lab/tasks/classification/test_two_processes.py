"""Two processes, started for real, find and do what one does with twice the batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agglo.embedded import classifier as embedded
from agglo.lab.evaluation.configs import configs_of
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings, run
from agglo.lab.tasks.classification.training.trainer import finetune
from agglo.models.opening import ModelSpec
from tests.support.fashion import last, log, plain, write_fashion
from tests.support.processes import accelerate_launch

STEP: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0.0, "evaluate_first": True, "repeated_augmentation": 1}
STEP |= {"shift": 2, "flip": 0.5, "lr_batch": 16, "model": embedded.NAME}


def work(data: Path, output: Path, batch: int) -> None:
    """Train for one step, evaluated before and after, and evaluate a grid of the trained model's weights."""
    finetune(plain(batch_size=batch, **STEP), data, output)
    configs = configs_of(["atc", "tome"], keep_rates=[0.5])
    spec = ModelSpec(embedded.NAME, embedded.WEIGHTS)
    run(EvaluationSettings(spec, data, configs, batch_size=5, workers=0, threads=1), output / "grid.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one process, and of two with half the batch each."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_fashion(folder / "data", n_train=16, n_validation=21)
    work(data, folder / "one", 16)
    accelerate_launch("-m", __name__, str(data), str(folder / "two"), "8")
    return folder / "one", folder / "two"


def test_evaluation_gives_the_same_numbers(runs: tuple[Path, Path]) -> None:
    one, two = (log(run) for run in runs)
    assert [row["epoch"] for row in one] == [row["epoch"] for row in two] == ["0", "1"]
    assert one[0]["top1"] == two[0]["top1"] and one[0]["top5"] == two[0]["top5"]
    # 21 images in batches of 8 come out even for neither: no image is left out or counted twice.
    assert (float(one[0]["top1"]) * 21 / 100) % 1 == pytest.approx(0, abs=1e-6)
    grids = [json.loads((run / "grid.json").read_text()) for run in runs]
    assert [grid["settings"]["processes"] for grid in grids] == [1, 2]
    for same in ("top1", "top5", "counts", "config"):
        assert [result[same] for result in grids[0]["results"]] == [result[same] for result in grids[1]["results"]]
    assert [result["images"] for result in grids[1]["results"]] == [21] * 3


def test_a_step_is_the_same_within_rounding(runs: tuple[Path, Path]) -> None:
    one, two = (last(run) for run in runs)
    assert json.loads((runs[1] / "settings.json").read_text())["processes"] == 2
    moments = [state["optimiser"]["state"] for state in (one, two)]
    for index in moments[0]:
        # The first moment is a tenth of the gradient.
        torch.testing.assert_close(*(found[index]["exp_avg"] for found in moments), rtol=1e-3, atol=1e-7)
    for name, value in one["model"].items():
        # AdamW's first step is the sign of the gradient, so where that is all rounding (the bias of keys) it is noise.
        torch.testing.assert_close(value, two["model"][name], rtol=0, atol=2 * 2e-3)
        if "qkv.bias" not in name:
            assert torch.isclose(value, two["model"][name], rtol=0, atol=1e-5).float().mean() > 0.99, name
    losses = [float(log(run)[1]["train_loss"]) for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
