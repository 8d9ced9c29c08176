"""Two processes, started for real, find and do what one does with twice the batch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from agglo.embedded import classifier as embedded
from agglo.lab.tasks.classification.training.settings import TrainingSettings
from agglo.lab.tasks.classification.training.trainer import finetune
from tests.support.fashion import last, log, plain, write_fashion
from tests.support.processes import accelerate_launch


def launch(settings: TrainingSettings, data: Path, output: Path) -> None:
    given = {name: "none" if value is None else value for name, value in asdict(settings).items()}
    recipe = output.with_suffix(".toml")
    recipe.write_text("[settings]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()))
    done = accelerate_launch("-m", "agglo", "finetune", str(recipe), "--data", str(data), "--output", str(output))
    assert done.stdout.count("best: ") == 1  # one of them tells the result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one step, an evaluation before and after: of one process, and of two with half the batch each."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_fashion(folder / "data", n_train=16, n_validation=21)
    common: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0.0, "evaluate_first": True, "repeated_augmentation": 1}
    common |= {"shift": 2, "flip": 0.5, "lr_batch": 16, "model": embedded.NAME}
    finetune(plain(batch_size=16, **common), data, folder / "one")
    launch(plain(batch_size=8, **common), data, folder / "two")
    return folder / "one", folder / "two"


def test_evaluation_gives_the_same_numbers(runs: tuple[Path, Path]) -> None:
    one, two = (log(run) for run in runs)
    assert [row["epoch"] for row in one] == [row["epoch"] for row in two] == ["0", "1"]
    assert one[0]["top1"] == two[0]["top1"] and one[0]["top5"] == two[0]["top5"]
    # 21 images in batches of 8 come out even for neither: no image is left out or counted twice.
    assert (float(one[0]["top1"]) * 21 / 100) % 1 == pytest.approx(0, abs=1e-6)


def test_a_step_is_the_same_within_rounding(runs: tuple[Path, Path]) -> None:
    one, two = (last(run) for run in runs)
    assert json.loads((runs[1] / "settings.json").read_text())["processes"] == 2
    moments = [state["optimiser"]["state"] for state in (one, two)]
    for index in moments[0]:
        mean, other = (found[index]["exp_avg"] for found in moments)
        # The first moment is a tenth of the gradient.
        torch.testing.assert_close(mean, other, rtol=1e-3, atol=1e-7)
    names = list(one["model"])
    for name in names:
        # AdamW's first step is the sign of the gradient, so where that is all rounding (the bias of keys) it is noise.
        torch.testing.assert_close(one["model"][name], two["model"][name], rtol=0, atol=2 * 2e-3)
        close = torch.isclose(one["model"][name], two["model"][name], rtol=0, atol=1e-5)
        if "qkv.bias" not in name:
            assert close.float().mean() > 0.99, name


def test_training_loss_is_the_same(runs: tuple[Path, Path]) -> None:
    one, two = (float(log(run)[1]["train_loss"]) for run in runs)
    assert one == pytest.approx(two, rel=1e-5)
