"""The benchmark of one stage: its table, and what a page says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agglo.bench.methods import in_turns, table
from agglo.cli import main
from tools import pages


def record() -> dict[str, Any]:
    return {
        "machine": {"cpu": "a processor", "cores": 2, "threads": 1, "load": 0.1, "date": "2026-11-17T01:02:03+00:00"},
        "settings": {"batch_size": 4, "tokens": 16, "dim": 8, "target": 8, "repeats": 3},
        "reference": "tome",
        "results": [
            {"name": "atc", "milliseconds": [4.0, 30.0, 9.0]},
            {"name": "tome", "milliseconds": [2.0, 10.0, 1.0]},
        ],
    }


def test_ratios_are_of_the_same_turn() -> None:
    """The second turn is slow for both. 3 is the median of 2, 3 and 9; the ratio of the medians would be 4.5."""
    assert table(record()).rows == [["tome", 2.0, 1.0], ["atc", 9.0, 3.0]]


def test_turns_that_warm_up_are_not_kept() -> None:
    called: list[str] = []
    taken = in_turns({name: lambda name=name: called.append(name) for name in "ab"}, repeats=3)  # type: ignore[misc]
    assert called == ["a", "b"] * 5
    assert {name: len(of_name) for name, of_name in taken.items()} == {"a": 3, "b": 3}


def test_what_a_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    with pytest.raises(ValueError, match=r"results/bench/methods\.json was not measured yet: make bench-methods$"):
        pages.one_stage()
    with pytest.raises(ValueError, match=r"model-batch16\.json was not measured yet: make bench-model$"):
        pages.smaller_batches()
    (tmp_path / "results" / "bench").mkdir(parents=True)
    (tmp_path / "results" / "bench" / "methods.json").write_text(json.dumps(record()))
    said, _, shown = pages.one_stage().partition("\n\n")
    assert "reduce 4 images of 16 tokens (8 channels) to 8," in said
    assert said.endswith("medians of 3; a processor, 1 threads, load 0.1, 2026-11-17):")
    assert shown == table(record()).markdown()


def test_no_turns_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "methods", "--repeats", "0"]) != 0
    assert "repeats=0 and batch_size=64 must be at least 1" in capsys.readouterr().err
