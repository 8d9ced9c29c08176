"""The diffusion benchmark: what it runs, what it writes, what it says. Never how fast."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from agglo.hosts.diffusers.architectures import architecture_of
from agglo.lab.bench.diffusion import ARCHITECTURES, Options, contenders, measure, not_run, summaries
from agglo.lab.cli import main

diffusers: Any = pytest.importorskip("diffusers")
pytest.importorskip("tomesd")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "diffusion.json"
    words = ["--architecture", "tiny", "--size", "64", "--threads", "1", "--json", str(path)]
    assert main(["bench", "diffusion", *words]) == 0
    [found] = json.loads(path.read_text())["runs"]
    return dict(found)


def test_the_architecture_is_stable_diffusions() -> None:
    """Its published number of parameters, its five blocks with 4096 tokens, 320 channels there."""
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(sample_size=64, **ARCHITECTURES["sd15"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 859_520_964
    sites = [modules.site for modules in architecture_of(model).find(model)]  # type: ignore[union-attr]
    assert [site.inner for site in sites if site.downsample == 1] == [320] * 5


def test_what_runs(record: dict[str, Any]) -> None:
    first = {row["name"] for row in record["rows"] if row["keep_rate"] == 0.5}
    assert len(first) == 9 and {"tomesd", "agglo's tomesd", "atc", "atc, windows of 4, by need"} < first
    fewer = {row["name"] for row in record["rows"] if row["keep_rate"] == 0.25}
    assert fewer - first == {"tomesd, cells of 4 x 4"}
    assert record["tokens"] == 64 and record["machine"]["diffusers"] == diffusers.__version__
    for row in record["rows"]:
        assert [call["step"] for call in row["calls"]] == [0, 1, 2, 3, 4]


def test_clustering_is_a_part_of_the_time(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        for call in row["calls"]:
            if row["keep_rate"] is None or (row["keeps"] and call["step"] > 0):
                assert call["clustering"] == 0
            else:
                assert 0 < call["clustering"] < call["seconds"]


def test_what_cannot_run_says_why() -> None:
    [record] = measure(Options(architecture=("tiny",), size=64, keep_rates=(0.2,)))["runs"]
    lines = not_run(record)
    assert "tomesd cannot go from 8 x 8 tokens to 13" in lines[0]
    assert len(lines) == sum(not row["calls"] for row in record["rows"]) > 1
    assert next(row for row in record["rows"] if row["name"] == "tomesd, cells of 4 x 4")["calls"]
    assert "tomesd, cells of 4 x 4" not in {each["name"] for each in contenders("narrow", [0.26], 64)}


def test_large_models_get_few_rows_and_every_default_its_alternative() -> None:
    names = {name: [row["name"] for row in contenders(name, [0.5, 0.25], 64)] for name in ("sd15", "narrow")}
    assert set(names["sd15"]) < set(names["narrow"]) and len(names["sd15"]) <= 9
    for side, other in ((64, "atc, all tokens at once"), (16, "atc, windows of 8")):
        assert other in {row["name"] for row in contenders("sd15-one-layer", [0.5], side)}


def test_a_trained_model_has_errors_beside_its_times() -> None:
    """Merging hardly anything, or none but for rounding, is no error; and more is a larger one."""
    [record] = measure(Options(architecture=("embedded",), keep_rates=(0.99, 0.5), threads=1))["runs"]
    assert record["tokens"] == 256
    found = {(row["name"], row["keep_rate"]): row for row in summaries(record)}
    assert all(call["error"] == 0 for row in record["rows"] if row["name"] == "dense" for call in row["calls"])
    assert 0 < found["atc", 0.99]["error"] < 3 < found["atc", 0.5]["error"] < found["agglo's tomesd", 0.5]["error"] < 25
    assert found["agglo's tomesd", 0.5]["to_tomesd"] == 1 and "tomesd" not in {name for name, _ in found}


def test_statistics() -> None:
    times = {"dense": [10.0, 20, 10], "tomesd": [8.0, 10, 8], "atc": [5.0, 10, 9], "atc, kept": [13.0, 1, 4]}
    rows = []
    for name, seconds in times.items():
        calls = [{"repeat": 0, "step": n, "seconds": each, "clustering": each / 10} for n, each in enumerate(seconds)]
        keep_rate = None if name == "dense" else 0.5
        rows.append({"name": name, "keep_rate": keep_rate, "keeps": "kept" in name, "calls": calls})
    found = {one["name"]: one for one in summaries({"rows": rows})}
    assert (found["atc"]["seconds"], found["atc"]["least"], found["atc"]["most"]) == (9, 5, 10)
    assert found["atc"]["to_dense"] == 0.5  # the median of 0.5, 0.5 and 0.9
    assert found["atc"]["to_tomesd"] == 1.0  # the median of 5/8, 1 and 9/8
    assert found["atc, kept"]["seconds"] == pytest.approx(6)
    assert found["atc, kept"]["to_dense"] == pytest.approx(6 / (40 / 3))
    assert found["atc, kept"]["clustering"] == pytest.approx(0.6)
    assert "to_tomesd" not in found["dense"]
