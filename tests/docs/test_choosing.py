"""What docs/choosing.md recommends follows from the records, in either form that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import choosing_table

MEASURED = [  # name, what is typed, keep rate, top-1, GFLOPs
    ("dense", None, None, 80.0, 1.0),
    ("atc average", "atc", 0.7, 79.2, 0.6),
    ("atc complete", "atc:linkage=complete", 0.7, 79.4, 0.6),
    ("atc average", "atc", 0.5, 76.0, 0.5),
    ("tome", "tome", 0.5, 74.0, 0.5),
]


def records(as_reproduced: bool) -> dict[str, Any]:
    """The same measurements as `agglo evaluate` and as `agglo reproduce` write them."""
    rows = []
    for name, typed, rate, top1, gflops in MEASURED:
        common = {"keep_rate": rate, "top1": top1, "gflops": gflops, "varies": "no", "images": 100}
        common |= {"processor": "a processor", "date": "2026-11-16T00:00:00+00:00"}
        words = {"cell": {}, "method": name, "reduction": typed} if as_reproduced else {"name": name, "method": typed}
        rows.append({**common, **words})
    rows.append({"cell": {}, "method": "tome", "name": "tome", "keep_rate": 0.25, "cannot": "it merges pairs"})
    return {"results": rows}


def test_the_page_holds_what_the_records_say() -> None:
    page = choosing_table.PAGE.read_text(encoding="utf-8")
    assert choosing_table.page(page) == page, "`make choosing-page` writes it anew"


@pytest.mark.parametrize("as_reproduced", [False, True])
def test_the_cheapest_within_a_loss(as_reproduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "results/off-the-shelf/record.json" if as_reproduced else "benchmarks/results/off-the-shelf.json"
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(json.dumps(records(as_reproduced)))
    monkeypatch.setattr(choosing_table, "ROOT", tmp_path)
    lines = {
        line.split("|")[1].strip(): line for line in choosing_table.budgets().splitlines() if line.startswith("| ")
    }
    assert lines["0.5"].split("|")[2:4] == [" none ", "  "]
    assert "`atc:linkage=complete` at 0.7 | 79.4 | 60% | none" in lines["1"]  # of two equally cheap ones the better
    assert "`atc` at 0.5 | 76.0 | 50% | none" in lines["5"]
    assert "`tome` at 0.5 | 74.0 | 50%" in lines["10"]


def test_no_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing_table, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"no record of off-the-shelf/record\.json.* in results or benchmarks/results"):
        choosing_table.budgets()


def test_seeds_that_are_not_finished_do_not_count() -> None:
    found = [{"seed": 0, "name": "a"}, {"seed": 0, "name": "b"}, {"seed": 1, "name": "a"}]
    assert choosing_table._of_finished_seeds(found) == found[:2]
