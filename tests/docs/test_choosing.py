"""What docs/choosing.md recommends follows from the records."""

from __future__ import annotations

import pytest

from agglo.config import ReductionConfig
from tools import choosing

MEASURED = [  # name, what is typed, keep rate, top-1, GFLOPs
    ("dense", None, None, 80.0, 1.0),
    ("atc average", "atc:linkage=average", 0.7, 79.2, 0.6),
    ("atc complete", "atc:linkage=complete", 0.7, 79.4, 0.6),
    ("atc average", "atc:linkage=average", 0.5, 76.0, 0.5),
    ("tome", "tome:features=keys", 0.5, 74.0, 0.5),
]


def test_the_cheapest_within_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"varies": "no", "images": 100, "processor": "a processor", "date": "2026-11-16T00:00:00+00:00"}
    rows = [
        {
            **{"method": name, "keep_rate": rate, "top1": top1, "gflops": gflops, **common},
            "config": typed and ReductionConfig.parse(f"{typed},keep_rate={rate}").to_dict(),
        }
        for name, typed, rate, top1, gflops in MEASURED
    ]
    rows.append({"method": "tome", "keep_rate": 0.25, "cannot": "it merges pairs"})
    monkeypatch.setattr(choosing, "record", lambda name: {"results": rows if "off-the-shelf" in name else []})
    lines = {line.split("|")[1].strip(): line for line in choosing.budgets().splitlines() if line.startswith("| ")}
    assert lines["0.5"].split("|")[2:4] == [" none ", "  "]
    assert "`atc:linkage=complete` at 0.7 | 79.4 | 60% | none" in lines["1"]  # of two equally cheap ones the better
    assert "`atc` at 0.5 | 76.0 | 50% | none" in lines["5"]
    assert "`tome` at 0.5 | 74.0 | 50%" in lines["10"]


def test_seeds_that_are_not_finished_do_not_count() -> None:
    found = [{"seed": 0, "method": "a"}, {"seed": 0, "method": "b"}, {"seed": 1, "method": "a"}]
    assert choosing._of_finished_seeds(found) == found[:2]
