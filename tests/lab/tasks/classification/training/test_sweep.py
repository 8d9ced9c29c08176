"""Which runs a sweep has, the folder that each of them gets, and their ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agglo.lab.tasks.classification.training.settings import RECIPES
from agglo.lab.tasks.classification.training.sweep import sweep, table
from agglo.lab.training.recipes import assignments
from tests.support.fashion import plain, write_fashion


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=5e-4,1e-3", [5e-4, 1e-3]),
        ("keep_rate=0.5,none,0.25", [0.5, "none", 0.25]),
        ("patch_drop_rates=[0.5,0.5],[]", [[0.5, 0.5], []]),
        ("method_options={a = 1, b = [2, 3]},{}", [{"a": 1, "b": [2, 3]}, {}]),
        ("checkpoint=w1/m.safetensors,x=1", ["w1/m.safetensors", "x=1"]),
    ],
)
def test_values_to_try(text: str, values: list[Any]) -> None:
    assert assignments(text) == (text.partition("=")[0], values)


def test_sweep_ranks_resumes_and_survives_a_run_that_diverges(tmp_path: Path) -> None:
    data, output = write_fashion(tmp_path / "data"), tmp_path / "sweep"
    text = "\n".join(
        f"{name} = {json.dumps('none' if value is None else value)}"
        for name, value in vars(plain(epochs=1, warmup_epochs=0.0, checkpoint_minutes=60.0)).items()
    )
    recipe = RECIPES.parse(f"[settings]\n{text}", "own")
    ranked = sweep(recipe, {"batch_size": 16}, {"lr": [1e-3, 1e30]}, data, output)
    assert [row["lr"] for row in ranked] == [1e-3, 1e30]
    assert ranked[1]["best_metric"] is None and "lower lr" in ranked[1]["note"]
    assert json.loads((output / "sweep.json").read_text())["ranked"] == ranked
    weights = output / "lr=0.001" / "best" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert sweep(recipe, {"batch_size": 16}, {"lr": [1e-3, 1e30]}, data, output) == ranked
    assert weights.stat().st_mtime_ns == before
    assert table(ranked).splitlines()[2].split() == ["1e+30", "diverged", "diverged"]
    with pytest.raises(ValueError, match="weight_decay"):
        sweep(recipe, {"batch_size": 16, "weight_decay": 0.3}, {"lr": [1e-3]}, data, output)
    for name, values in {"frozen_epochs": [0, -1], "precision": ["no", "bf16"]}.items():
        with pytest.raises(ValueError, match=name):
            sweep(recipe, {}, {name: values}, data, tmp_path / "never")
    assert not (tmp_path / "never").exists()
