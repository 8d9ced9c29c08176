"""The model benchmark: what it times, what it writes, what it says. Never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import agglo
from agglo import schedule
from agglo.lab.bench import model as benchmark_model
from agglo.lab.bench.model import Options, describe, measure, plot, run_of
from agglo.lab.evaluation.configs import budget_of
from agglo.lab.evaluation.grid import Reducible
from agglo.methods.baselines import Slice
from agglo.models.opening import ModelSpec, build

pytest.importorskip("timm")

NAME = "test_vit"


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_model, "_LEAST_SECONDS", 0.0)


def options(**changes: Any) -> Options:
    own = {"batch_size": [2], "repeats": 2, "linkage": ["average", "single"], "device": "cpu"}
    return Options(model=NAME, **{**own, **changes})


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # made before any test's own patches
        patch.setattr(benchmark_model, "_LEAST_SECONDS", 0.0)
        return run_of(json.loads(json.dumps(measure(options(threads=1, repeats=3)))))


def keep_rate_of(result: dict[str, Any]) -> float | None:
    return None if result["config"] is None else result["config"]["keep_rate"]


def test_what_runs(result: dict[str, Any]) -> None:
    ran = [(keep_rate_of(r), r["name"]) for r in result["results"]]
    assert ran == [
        (None, "dense"),
        (None, "dense again"),
        (0.5, "free"),
        (0.5, "tome"),
        (0.5, "atc average"),
        (0.5, "atc single"),
        (0.25, "free"),
        (0.25, "atc average"),
        (0.25, "atc single"),
    ]
    [skipped] = result["skipped"]
    assert (skipped["name"], keep_rate_of(skipped)) == ("tome", 0.25)
    assert "at least 50 stay" in skipped["reason"]


def test_counts_are_those_really_left(result: dict[str, Any]) -> None:
    counts = {(keep_rate_of(r), r["name"]): r["counts"] for r in result["results"]}
    assert counts[0.5, "free"] == counts[0.5, "atc average"] == [100, 50, 50, 25, 12, 12]
    assert counts[0.5, "tome"] == [100, 50, 50, 25, 13, 13]


def test_statistics_follow_from_the_timings(result: dict[str, Any]) -> None:
    by_name = {(keep_rate_of(r), r["name"]): r for r in result["results"]}
    dense, free = (by_name[key]["images_per_second"] for key in ((None, "dense"), (0.25, "free")))
    found = by_name[0.25, "atc single"]
    own = found["images_per_second"]
    assert (len(own), found["median"], found["min"], found["max"]) == (3, median(own), min(own), max(own))
    assert found["to_dense"] == pytest.approx(median(a / b for a, b in zip(own, dense, strict=True)))
    assert found["to_free"] == pytest.approx(median(a / b for a, b in zip(own, free, strict=True)))
    again = by_name[None, "dense again"]["images_per_second"]
    assert result["noise"] == pytest.approx(max(abs(a / b - 1) for a, b in zip(again, dense, strict=True)))


def test_table_and_plot(result: dict[str, Any], tmp_path: Path) -> None:
    assert result["machine"]["threads"] == 1 and result["settings"]["batch_size"] == 2
    lines = describe({"runs": [result]}).splitlines()
    [atc] = [line for line in lines if line.startswith("| keep 0.25 | atc single")]
    expected = next(r for r in result["results"] if (keep_rate_of(r), r["name"]) == (0.25, "atc single"))
    assert atc.endswith(f"| {expected['to_dense']:.2f} | {expected['to_free']:.2f} |") and "100 25 6 1" in atc
    assert any("noise:" in line and f"{result['noise']:.1%}" in line for line in lines)
    assert any(line.startswith("- not run: tome at keep 0.25") for line in lines)
    pytest.importorskip("matplotlib")
    plot(result, tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").stat().st_size > 1000


def test_free_reduction_is_the_dense_model_on_the_first_tokens() -> None:
    model: Any = build(ModelSpec(NAME))
    image = torch.rand(2, 3, 160, 160)
    agglo.apply(model, Slice(), keep_rate=0.25, blocks=(2,), proportional=False)
    with torch.no_grad():
        reduced = model(image)
        agglo.remove(model)
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(image))))
        for index, block in enumerate(model.blocks):
            if index == 2:
                x = x + block.ls1(block.attn(block.norm1(x)))
                x = x[:, :26]
                x = x + block.ls2(block.mlp(block.norm2(x)))
            else:
                x = block(x)
        expected = model.forward_head(model.norm(x))
    torch.testing.assert_close(reduced, expected, atol=1e-5, rtol=0)


def test_contenders_take_turns_there_and_back_with_dense_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    timed: list[str] = []
    apply = Reducible.apply

    def noting_apply(self: Reducible, config: Any) -> None:
        applied.append("dense" if config is None else config.method)
        apply(self, config)

    def noting_seconds(*_: Any) -> float:
        timed.append(applied[-1])
        return 1.0

    monkeypatch.setattr(Reducible, "apply", noting_apply)
    monkeypatch.setattr(benchmark_model, "_seconds", noting_seconds)
    measure(options(method=["atc"], linkage=None, keep_rate=[0.5]))
    order = ["dense", "free", "atc", "dense"]
    warm_up = [name for name in order for _ in range(2)]
    assert timed == warm_up + order + order[::-1]


def test_schedules_have_ceilings_of_their_own() -> None:
    budgets = ["keep 0.5", "linear:4", "stages:0.5,blocks=[2]"]
    found = run_of(measure(options(method=["atc"], linkage=None, keep_rate=[0.5], schedule=budgets[1:], repeats=1)))
    ran = {(budget_of(r), r["name"]): r for r in found["results"]}
    assert list(ran)[2:] == [(budget, name) for budget in budgets for name in ("free", "atc average")]
    assert ran["linear:4", "free"]["counts"] == schedule.Linear(4).counts(100, 6)


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": [0]}, {"dtype": "int8"}, {"device": "gpu"}, {"method": ["bogus"]}, {"linkage": ["ward"]},
     {"schedule": ["linear"]}, {"keep_rate": [0.5, 1.5]}],
)  # fmt: skip
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        measure(options(**changes))
