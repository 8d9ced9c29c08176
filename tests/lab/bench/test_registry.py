"""Every benchmark is listed once and can say what it takes; the small ones run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agglo
from agglo.lab.bench.methods import table as methods_table
from agglo.lab.cli import main
from agglo.lab.paper.registry import BENCHMARKS

FOLDER = Path(agglo.__file__).parent / "lab" / "bench"


def test_every_module_that_runs_is_listed() -> None:
    runs = {path.stem for path in FOLDER.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert runs == set(BENCHMARKS)


def test_methods_are_timed_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "methods.json"
    small = ["--batch-size", "2", "--tokens", "16", "--repeats", "1", "--json", str(path)]
    assert main(["bench", "methods", *small]) == 0
    record = json.loads(path.read_text())
    assert record["machine"]["cpu"] and record["machine"]["date"]
    assert record["settings"] | {"tokens": 16, "dim": 192, "target": 8} == record["settings"]
    assert all(len(result["milliseconds"]) == 1 for result in record["results"])
    assert methods_table(record).markdown() in capsys.readouterr().out


def test_ratios_of_methods_are_of_the_same_turn() -> None:
    """The second turn is slow for both. 3 is the median of 2, 3 and 9; the ratio of the medians would be 4.5."""
    taken = {"atc": [4.0, 30.0, 9.0], "tome": [2.0, 10.0, 1.0]}
    results = [{"name": name, "milliseconds": milliseconds} for name, milliseconds in taken.items()]
    assert methods_table({"reference": "tome", "results": results}).rows == [["tome", 2.0, 1.0], ["atc", 9.0, 3.0]]
