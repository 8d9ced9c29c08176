"""The study in miniature: it covers every method, and its ranks and differences are what they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agglo
from agglo.experiments.fashion_mnist import read_idx, write_idx
from benchmarks import mini_study
from benchmarks import mini_study_report as report


def test_every_method_takes_part() -> None:
    assert {entry.method for entry in mini_study.ENTRIES} == {info.name for info in agglo.list_methods()}
    learning = {info.name for info in agglo.list_methods() if info.learns}
    told = {entry.method for entry in mini_study.ENTRIES if entry.learns}
    assert told == learning


def results(values: dict[str, dict[float, float]], dense: float = 90.0) -> dict[str, Any]:
    cells = [
        {"name": name, "keep_rate": rate, "top1": top1} for name, row in values.items() for rate, top1 in row.items()
    ]
    about = {
        "machine": {"gpu": None, "cpu": "a processor", "date": "2026-11-16T00:00"},
        "images": {"train": 60, "t10k": 10},
    }
    return {**about, "results": [{"name": "dense", "keep_rate": None, "top1": dense}, *cells]}


VALUES = {
    "tome": {0.5: 70.0},
    "kmedoids": {0.25: 50.0, 0.5: 60.0},
    "sit": {0.25: 58.0, 0.5: 71.0},
    "atc single": {0.25: 50.0, 0.5: 65.0},
    "atc average": {0.25: 55.0, 0.5: 72.0},
    "atc complete": {0.25: 56.0, 0.5: 70.0},
}


def test_ranks_and_differences() -> None:
    dense, found = report.cells(results(VALUES))
    assert dense == 90 and found == VALUES
    ranked = report.ranks(found, [0.25, 0.5])
    assert ranked["sit"] == {0.25: 1, 0.5: 2} and ranked["atc average"] == {0.25: 3, 0.5: 1}
    hard = report.ranks(report.merging_hard(found), [0.25, 0.5])
    assert "sit" not in hard and hard["atc average"] == {0.25: 2, 0.5: 1} and hard["atc complete"][0.25] == 1
    assert ranked["tome"] == {0.5: 3.5} and ranked["kmedoids"][0.25] == 4.5, "equals share the mean of their ranks"
    assert report.differences(found, [0.25, 0.5], report.HARD)["atc average"] == {0.25: 5.0, 0.5: 2.0}
    everybody = (*report.HARD, *report.SOFT)
    assert report.differences(found, [0.25, 0.5], everybody)["atc average"] == {0.25: -3.0, 0.5: 1.0}


def test_report_is_written(tmp_path: Path) -> None:
    text = report.write(results(VALUES), results(VALUES, dense=91.0), tmp_path)
    assert "| tome | cannot | 70.00 | 70.00 |" in text and "dense 91.00" in text
    assert (tmp_path / "tables.md").read_text() == text
    for name in ("accuracy.png", "ranks.png", "difference.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(3, 5, 4), (7,), (0, 2, 2)])
def test_idx_files_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_idx(tmp_path / "some.gz", values)
    assert np.array_equal(read_idx(tmp_path / "some.gz", len(shape)), values)


def test_entries_that_are_not_measured_anew_stay_with_their_processor(tmp_path: Path) -> None:
    recorded = results({"tome": {0.5: 90.0}, "atc average": {0.5: 91.0}})
    path = tmp_path / "fine-tuned.json"
    path.write_text(json.dumps({**recorded, "images": mini_study.IMAGES}))
    kept = mini_study._kept(path, ["tome"])
    names = {(mini_study.CELLS[number][0].name, result["processor"]) for number, result in kept.items()}
    assert names == {("dense", "a processor"), ("atc average", "a processor")}
    path.write_text(json.dumps({**recorded, "images": {"train": 1, "t10k": 1}}))
    with pytest.raises(ValueError, match="train every entry"):
        mini_study._kept(path, ["tome"])
