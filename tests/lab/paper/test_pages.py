"""Records in results/ are continued by today's cells, and the tables that pages show follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agglo.config import ReductionConfig
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


def test_the_readme_takes_accuracy_and_speed_from_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"model": choosing.README_MODEL, "data": "imagenet", "images": 2000}
    top1 = {("dense", None): 72.5, ("tome", 0.5): 64.65, ("atc average", 0.5): 69.5, ("atc average", 0.25): 47.55}
    accuracy: list[dict[str, Any]] = [{**where, "method": n, "keep_rate": r, "top1": v} for (n, r), v in top1.items()]
    accuracy.append({**where, "model": "another", "method": "dense", "keep_rate": None, "top1": 1.0})
    recipes = [{**where, "method": "recipe", "flops": 0.5, "quality": {"lost": 60, "gained": 40}}]
    speeds = {
        ("dense", None): (1.0, 1.0),
        ("free", "free:keep_rate=1.0"): (1.01, 1.2),
        ("tome", "tome:keep_rate=0.5"): (1.4, 2.3),
        ("atc average", "atc:keep_rate=0.5"): (1.5, 2.4),
        ("atc average", "atc:flops=0.5"): (1.6, 2.5),
    }
    runs = []
    for batch_size, which in ((1, 0), (64, 1)):
        rows = [
            {"name": n, "config": c and ReductionConfig.parse(c).to_dict(), "to_dense": v[which]}
            for (n, c), v in speeds.items()
        ]
        machine = {"cpu": "a processor", "gpu": None, "threads": 2, "date": "2026-11-16T00:34:40+00:00"}
        settings = {"batch_size": batch_size, "dtype": "float32"}
        runs.append({"machine": machine, "settings": settings, "results": rows})
    records = {choosing.OFF_THE_SHELF[0]: {"results": accuracy}, choosing.RECIPE: {"results": recipes}}
    monkeypatch.setattr(choosing, "record", lambda name: records.get(name, {"runs": runs}))
    table = [[cell.strip() for cell in line.split("|")[2:-1]] for line in choosing.readme().splitlines()]
    assert table[2:7] == [
        ["72.5", "1.00x", "1.00x"],
        ["72.5", "1.01x", "1.20x"],
        ["64.7", "1.40x", "2.30x"],
        ["69.5", "1.50x", "2.40x"],
        ["71.5", "1.60x", "2.50x"],
    ]
