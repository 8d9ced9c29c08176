"""The benchmark of one stage: its table, and what a page says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agglo.lab.bench.methods import in_turns, table
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
    assert "".join(called) == "abab" + "abbaab"
    assert {name: len(of_name) for name, of_name in taken.items()} == {"a": 3, "b": 3}


def test_a_benchmark_that_was_not_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    with pytest.raises(ValueError, match=r"make bench-model$"):
        pages.smaller_batches()
