"""The diffusion benchmark: what it runs, what it writes, what it says. Never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.lab.bench import diffusion
from agglo.lab.bench.diffusion import (
    ARCHITECTURES,
    Options,
    Trajectory,
    all_rows,
    measure,
    random_unet,
    self_attentions,
)
from agglo.lab.bench.diffusion_report import notes, summaries, table
from agglo.lab.cli import main

diffusers: Any = pytest.importorskip("diffusers")
pytest.importorskip("tomesd")

STEPS = 5


def settings(**changes: Any) -> Options:
    return Options(**{"architecture": "tiny", "size": 64, "window": 4, "steps": STEPS, **changes})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bench") / "diffusion.json"
    words = ["--architecture", "tiny", "--size", "64", "--window", "4", "--steps", str(STEPS), "--threads", "1"]
    assert main(["bench", "diffusion", *words, "--json", str(found)]) == 0
    return found


@pytest.fixture
def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row(record: dict[str, Any], name: str, keep_rate: float | None = 0.5) -> dict[str, Any]:
    [found] = [row for row in record["rows"] if (row["name"], row["keep_rate"]) == (name, keep_rate)]
    return found


def test_the_architecture_is_stable_diffusions() -> None:
    """Its published number of parameters, its five blocks with 4096 tokens, eight heads of 40 channels there."""
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(sample_size=64, **ARCHITECTURES["sd15"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 859_520_964
    assert [(m.site.downsample, m.site.heads, m.site.inner) for m in self_attentions(model, 1)] == [(1, 8, 320)] * 5


def test_what_runs(record: dict[str, Any]) -> None:
    assert [row["name"] for row in record["rows"] if row["keep_rate"] is None] == ["dense", "without self-attention"]
    ways = {
        "tomesd",
        "agglo's tomesd",
        "atc, paper",
        "atc",
        "atc, shared by the blocks",
        "atc, kept for 5 steps",
        "atc, windows of 4",
        "atc, windows of 4, by need",
        "atc, neighbours only",
        "atc, windows of 4, kept for 5 steps",
    }
    assert {row["name"] for row in record["rows"] if row["keep_rate"] == 0.5} == ways
    fewer = {row["name"] for row in record["rows"] if row["keep_rate"] == 0.25}
    assert "tomesd, cells of 4 x 4" in fewer
    assert fewer - {"tomesd, cells of 4 x 4"} < ways
    for one in record["rows"]:
        wanted = [0, 2, 4]
        if one["keeps"] or one["name"] == "dense":
            wanted = [0, 1, 2, 3, 4]
        elif one["name"] == "without self-attention":
            wanted = [0]
        assert [call["step"] for call in one["calls"]] == wanted
    assert record["tokens"] == 64
    assert record["machine"]["diffusers"] == diffusers.__version__


def test_clustering_is_a_part_of_the_time(record: dict[str, Any]) -> None:
    for one in record["rows"]:
        for call in one["calls"]:
            if one["keep_rate"] is None or (one["keeps"] and call["step"] > 0):
                assert call["clustering"] == 0
            else:
                assert 0 < call["clustering"] < call["seconds"]


def test_agglos_tomesd_is_tomesd(record: dict[str, Any]) -> None:
    theirs, ours = (row(record, name)["calls"] for name in ("tomesd", "agglo's tomesd"))
    for one, other in zip(theirs, ours, strict=True):
        assert one["error"] == pytest.approx(other["error"], rel=1e-3)
        assert one["attention_error"] == pytest.approx(other["attention_error"], rel=1e-3)


def test_without_self_attention_all_of_it_is_missing(record: dict[str, Any]) -> None:
    [call] = row(record, "without self-attention", None)["calls"]
    assert call["attention_error"] == pytest.approx(1)
    errors = [call["error"] for one in record["rows"] if one["keep_rate"] == 0.5 for call in one["calls"]]
    assert 0 < max(errors) < call["error"]


def predictions(model: Any, dense: Any, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Reduced and dense, step by step, by a loop of our own."""
    trajectory = Trajectory(dense, 2, STEPS, 0.5)
    agglo.apply(model, keep_rate=0.5, **options)
    found = []
    with torch.no_grad(), agglo.hosts.diffusers.generation():
        for call in trajectory.calls():
            right = dense(call.sample, call.timestep, call.text).sample
            found.append((model(call.sample, call.timestep, call.text).sample, right))
            trajectory.advance(call.timestep, right)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("atc", {}),
        ("atc, paper", {"features": "tokens", "proportional": False}),
        ("atc, kept for 5 steps", {"every": 5}),
        ("atc, windows of 4, kept for 5 steps", {"every": 5, "window": 4}),
    ],
)
def test_errors_are_those_of_a_loop_of_ones_own(record: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    pairs = predictions(random_unet("tiny", 8), random_unet("tiny", 8), **options)
    for call in row(record, name)["calls"]:
        reduced, dense = pairs[call["step"]]
        each = [float((a - b).norm() / b.norm()) for a, b in zip(reduced, dense, strict=True)]
        assert call["error"] == pytest.approx(sum(each) / 2, rel=1e-3)


def test_the_trajectory_is_that_of_the_scheduler() -> None:
    """From the second latent on, what diffusers' pipelines would compute from the dense predictions."""
    model = random_unet("tiny", 8)
    trajectory = Trajectory(model, 4, 3, 0.5)
    assert [b - a for a, b in zip(trajectory.timesteps, trajectory.timesteps[1:], strict=False)] == [-20, -20]
    alphas = trajectory.scheduler.alphas_cumprod
    for call in trajectory.calls():
        assert torch.equal(call.sample[:2], call.sample[2:])
        with torch.no_grad():
            predicted = call.predict(model)
        noise = predicted[:2] + 7.5 * (predicted[2:] - predicted[:2])
        now, after = alphas[call.timestep], alphas[call.timestep - 20]
        clean = (call.sample[:2] - (1 - now).sqrt() * noise) / now.sqrt()
        trajectory.advance(call.timestep, predicted)
        expected = after.sqrt() * clean + (1 - after).sqrt() * noise
        assert torch.allclose(trajectory.latents, expected, atol=1e-4)


def test_a_stopped_run_continues_with_the_next_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"keep_rates": (0.5,), "steps": 1, "repeats": 2}
    whole, file = measure(settings(**few)), tmp_path / "stopped.json"
    real = diffusion.run_generation

    def killed_in_the_second(*arguments: Any) -> Any:
        if arguments[2] == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(diffusion, "run_generation", killed_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            measure(settings(**few, json=file))
    first = json.loads(file.read_text())
    went_on = measure(settings(**few, json=file))
    assert json.loads(file.read_text()) == json.loads(json.dumps(went_on))
    for expected, stopped, found in zip(whole["rows"], first["rows"], went_on["rows"], strict=True):
        assert [call["repeat"] for call in found["calls"]] == [0, 1]
        assert found["calls"][:1] == stopped["calls"]
        if "tomesd" not in expected["name"]:  # these draw
            was, now = ([call.get("error", 0) for call in row["calls"]] for row in (expected, found))
            assert now == pytest.approx(was, rel=1e-4)
    assert measure(settings(**few, json=file)) == json.loads(file.read_text())
    with pytest.raises(ValueError, match=r"settings\.size"):
        measure(settings(**few, size=80, json=file))


def test_nothing_merges_at_keep_rate_one() -> None:
    record = measure(settings(keep_rates=(1.0,), steps=1))
    for one in record["rows"]:
        if one["keep_rate"] == 1:
            assert one["calls"][0]["error"] < 1e-5


def test_what_cannot_run_says_why() -> None:
    record = measure(settings(keep_rates=(0.2,), steps=1, window=2))
    assert row(record, "tomesd", 0.2)["cannot"] == (
        "tomesd cannot go from 8 x 8 tokens to 13: one stays in each cell of 2 x 2, 16 in all"
    )
    assert "tomesd cannot go" in row(record, "agglo's tomesd", 0.2)["cannot"]
    assert "16" in row(record, "atc, windows of 2", 0.2)["cannot"]  # windows, for 13 groups
    assert row(record, "tomesd, cells of 4 x 4", 0.2)["calls"]
    assert "not run: tomesd at keep 0.2: tomesd cannot go" in table(record)


@pytest.mark.parametrize(("keep_rate", "has"), [(0.26, False), (0.25, True)])
def test_larger_cells_where_those_of_four_can_do_no_more(keep_rate: float, has: bool) -> None:
    names = [row.name for row in all_rows([keep_rate], 64, 16)]
    assert ("tomesd, cells of 4 x 4" in names) == has


def made_up(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """A record with keep rate 0.5 and one generation of as many steps as there are seconds."""
    rows = []
    for name, times in {"without self-attention": [9.0], **seconds}.items():
        calls: list[dict[str, Any]] = [
            {"repeat": 0, "step": step, "timestep": 900 - step, "seconds": time, "clustering": time / 10}
            | ({} if name == "dense" else {"error": 0.1 * (step + 1), "attention_error": 0.2})
            for step, time in enumerate(times)
        ]
        keep_rate = None if name in ("dense", "without self-attention") else 0.5
        rows.append({"name": name, "keep_rate": keep_rate, "keeps": "kept" in name, "cannot": None, "calls": calls})
    return {"rows": rows}


def test_statistics() -> None:
    times = {"dense": [10.0, 20, 10], "tomesd": [8.0, 10, 8], "atc": [5.0, 10, 9], "atc, kept": [13.0, 1, 4]}
    record = made_up(times)
    found = {one["name"]: one for one in summaries(record)}
    assert (found["atc"]["seconds"], found["atc"]["least"], found["atc"]["most"]) == (9, 5, 10)
    assert found["atc"]["to_dense"] == 0.5  # the median of 0.5, 0.5 and 0.9
    assert found["atc"]["to_tomesd"] == 1.0  # the median of 5/8, 1 and 9/8
    assert found["atc, kept"]["seconds"] == pytest.approx(6)
    assert found["atc, kept"]["to_dense"] == pytest.approx(6 / (40 / 3))
    assert found["atc, kept"]["to_tomesd"] == pytest.approx(6 / (26 / 3))
    assert found["atc, kept"]["clustering"] == pytest.approx(0.6)
    assert found["atc"]["error"] == pytest.approx(20)
    assert not {"error", "to_tomesd"} & found["dense"].keys()
    assert "seconds" not in found["without self-attention"]
    assert notes(record)[-1].endswith("met by atc (1.000); atc, kept (0.692)")
    assert "missed by atc (1.125)" in notes(made_up({**times, "atc": [9.0, 11, 9]}))[-1]


def test_the_table_has_the_mean_error(record: dict[str, Any]) -> None:
    [line] = [line for line in table(record).splitlines() if line.startswith("0.5   atc, neighbours only")]
    errors = [call["error"] for call in row(record, "atc, neighbours only")["calls"]]
    assert line.split()[-2] == f"{100 * sum(errors) / 3:.2f}"


@pytest.mark.parametrize(
    "changes",
    [{"size": 72}, {"architecture": "sd15", "size": 64}, {"batch": 3}, {"steps": 51}, {"keep_rates": ()},
     {"keep_rates": (0.5, 1.5)}],
)  # fmt: skip
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(changes)[-1]}="):
        settings(**changes)
