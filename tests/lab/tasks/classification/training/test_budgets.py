"""Runs whose tokens are reduced by a keep rate, a threshold or any schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agglo
from agglo.lab.tasks.classification.training.trainer import build_models, finetune
from tests.support.fashion import log, plain, write_fashion

BUDGETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"keep_rate": 0.5}, {"keep_rate": 0.5}),
    ({"threshold": 0.2}, {"threshold": 0.2}),
    ({"schedule": "linear:5"}, {"schedule": agglo.Linear(5)}),
    ({"schedule": "constant:5,start=1"}, {"schedule": "constant:5,start=1"}),
    ({"schedule": "stages:0.9,0.5,blocks=[1,3]"}, {"schedule": agglo.Stages([0.9, 0.5], blocks=[1, 3])}),
    ({"schedule": "counts:30,20,10"}, {"schedule": agglo.Counts([30, 20, 10])}),
]


@pytest.mark.parametrize(("settings", "budget"), BUDGETS)
def test_the_model_is_reduced_as_the_settings_say(settings: dict[str, Any], budget: dict[str, Any]) -> None:
    model, _ = build_models(plain(method="atc", linkage="single", **settings), 10)
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def class_token() -> torch.Tensor:  # the head of an untrained model answers 0 to everything
        with torch.inference_mode():
            return model.eval().forward_features(images)[:, 0]  # type: ignore[operator, no-any-return]

    found = class_token()
    agglo.apply(agglo.remove(model), "atc", linkage="single", **budget)
    expected = class_token()
    agglo.remove(model)
    dense = class_token()
    assert torch.equal(found, expected) and not torch.allclose(found, dense)


@pytest.mark.parametrize("budget", [{"threshold": 0.2}, {"schedule": "linear:5"}])
def test_a_run_learns_and_belongs_to_its_budget(budget: dict[str, Any], tmp_path: Path) -> None:
    data = write_fashion(tmp_path / "data")
    settings = plain(method="atc", epochs=8, evaluate_every=8, warmup_epochs=0.0, **budget)
    finetune(settings, data, tmp_path / "run")
    [row] = log(tmp_path / "run")
    assert float(row["train_loss"]) < 2.1 < math.log(10), "less than by guessing"
    other = replace(settings, threshold=None, schedule="linear:4")
    with pytest.raises(ValueError, match=r"schedule: .* there, 'linear:4' now"):
        finetune(other, data, tmp_path / "run")
