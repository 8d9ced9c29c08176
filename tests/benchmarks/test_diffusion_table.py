"""The table of the diffusion benchmark on its page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agglo.bench.diffusion import DiffusionSettings, measure
from agglo.bench.diffusion_report import summaries
from benchmarks import diffusion_table

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found = measure(DiffusionSettings("tiny", size=64, window=4, steps=1, keep_rates=(0.5, 0.2)))
    return json.loads(json.dumps(found))  # as a file would give it back


def test_it_is_put_at_the_end_and_then_replaced(record: dict[str, Any]) -> None:
    page = "# Title\n\nWords.\n"
    assert not diffusion_table.has_place(page)
    once = diffusion_table.with_table(page, record)
    assert once.startswith(page) and diffusion_table.has_place(once)
    assert diffusion_table.with_table(once, record) == once
    assert once.count("| 0.5 | atc, paper |") == 1
    [line] = [line for line in once.splitlines() if line.startswith("| 0.5 | atc |")]
    [atc] = [row for row in summaries(record) if (row["name"], row["keep_rate"]) == ("atc", 0.5)]
    assert f"| {atc['seconds']:.2f} |" in line and line.endswith(f"| {100 * atc['attention_error']:.2f} |")
    assert "| 0.2 | tomesd | cannot |" in once and "- not run: tomesd at keep 0.2: " in once


def test_an_unfinished_run_has_no_table(record: dict[str, Any]) -> None:
    rows = [{**row, "calls": row["calls"][:-1]} for row in record["rows"]]
    with pytest.raises(ValueError, match=r"diffusion\.json is unfinished"):
        diffusion_table.with_table("", {**record, "rows": rows})
