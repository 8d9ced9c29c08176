"""Records in results/ are continued by today's cells, and the tables that pages show follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agglo.lab.paper.output import read_results
from agglo.lab.paper.registry import items
from agglo.utils.journal import key_of
from tools import choosing
from tools.pages import FULL, MINIATURE


@pytest.mark.parametrize("settings", [FULL, MINIATURE], ids=["full", "miniature"])
def test_committed_results_are_continued(settings) -> None:  # type: ignore[no-untyped-def]
    """Cells of today find the results that were committed; otherwise a study would be run again, beside the old one."""
    for item in items().values():
        known = {cell.key for seeds in (None, 3) for cell in item.cells(replace(settings, seeds=seeds))}
        orphans = [one["cell"] for one in read_results(settings.folder(item.name)) if key_of(one["cell"]) not in known]
        assert not orphans, f"{item.name} has results of cells that it does not ask for: {orphans[:3]}"


def test_speeds_of_the_readme_are_ratios_within_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"model": choosing.README_MODEL, "data": "imagenet", "images": 2000}
    top1 = {("dense", None): 72.5, ("tome", 0.5): 64.65, ("atc average", 0.5): 69.5, ("atc average", 0.25): 47.55}
    accuracy: list[dict[str, Any]] = [{**where, "method": n, "keep_rate": r, "top1": v} for (n, r), v in top1.items()]
    accuracy.append({**where, "method": "tome", "keep_rate": 0.25, "cannot": "it merges pairs"})
    accuracy.append({**where, "model": "another", "method": "dense", "keep_rate": None, "top1": 1.0})
    speeds = {
        ("dense", None): [10.0, 20.0, 10.0],
        ("free", 1.0): [20.0, 40.0, 10.0],
        ("tome", 0.5): [40.0, 80.0, 10.0],
        ("atc average", 0.5): [30.0, 60.0, 40.0],
        ("atc average", 0.25): [50.0, 100.0, 90.0],
    }
    results = [{"name": n, "config": r and {"keep_rate": r}, "images_per_second": v} for (n, r), v in speeds.items()]
    machine = {"cpu": "a processor", "gpu": None, "threads": 2, "date": "2026-11-16T00:34:40+00:00"}
    speed = {"machine": machine, "settings": {"batch_size": 64}, "results": results}
    monkeypatch.setattr(choosing, "record", lambda name: speed if "bench" in name else {"results": accuracy})
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in choosing.readme().splitlines()]
    assert rows[2:7] == [
        ["72.5", "1.00x", "2.00x"],
        ["64.7", "2.00x", "4.00x"],
        ["69.5", "1.50x", "3.00x"],
        ["cannot", "", ""],
        ["47.5", "2.50x", "5.00x"],
    ]
