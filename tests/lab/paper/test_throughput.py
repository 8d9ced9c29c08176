"""Throughput: frameworks give the same groups, times are of the passes that count, full memory is a result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from agglo.lab.paper.items import throughput
from agglo.lab.paper.output import write_output
from agglo.lab.paper.registry import item_named
from agglo.lab.paper.runner import attempt
from agglo.lab.paper.study import Settings
from tests.support.clocks import Clock

CPU = torch.device("cpu")


@pytest.mark.parametrize("framework", throughput.FRAMEWORKS[1:])
def test_frameworks_agree(framework: str) -> None:
    features = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0))
    own = throughput.contestant("agglo")(features, 15, "average")
    other = torch.as_tensor(throughput.contestant(framework)(features, 15, "average"))
    for a, b in zip(own, other, strict=True):
        pairs = len(torch.stack([a, b]).unique(dim=1).T)
        assert pairs == len(a.unique()) == len(b.unique()) == 15, "the same partition, into k groups"


@pytest.mark.parametrize(("passes", "counted"), [(42, 30), (13, 5), (12, 5), (11, 1)])
def test_a_quarter_of_the_passes_is_warm_up(passes: int, counted: int) -> None:
    ran: list[int] = []
    found = throughput.timed(lambda: ran.append(0), CPU, throughput.Timing(passes=passes))
    assert found["passes"] == counted and len(ran) <= passes
    assert found["range"][0] <= found["seconds"] <= found["range"][1]


def test_a_first_pass_that_compiles_does_not_decide_how_many_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    seconds = iter([0.5, *[0.25] * 99])
    found = throughput.timed(lambda: clock.advance(next(seconds)), CPU, throughput.Timing(seconds=10.5))
    assert found == {"seconds": 0.25, "range": [0.25, 0.25], "passes": 30}


def test_several_processes_would_time_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="of one process"):
        item_named("throughput-tokens").open(Settings(miniature=True))


def test_items(tmp_path: Path) -> None:
    settings = Settings(miniature=True, output=tmp_path)
    for name, chosen in (
        ("throughput-model", {"batch": 1, "keep_rate": 0.25}),
        ("throughput-frameworks", {"batch": 4, "framework": "scipy"}),
        ("throughput-tokens", {"tokens": 256, "linkage": "single"}),
    ):
        item = item_named(name)
        item = dataclasses.replace(item, miniature=dataclasses.replace(item.miniature, passes=2, seconds=1.0))
        run = item.open(settings)
        cells = [c for c in item.cells(settings) if all(c.about[key] == value for key, value in chosen.items())]
        results = [{**cell.about, **attempt(run, cell), "processor": "p", "date": "2026-11-17"} for cell in cells]
        done = [result for result in results if "cannot" not in result]
        assert all(result["images_per_second"] > 0 for result in done)
        assert [r["method"] for r in results if "cannot" in r] == (["tome"] if name == "throughput-model" else [])
        folder = write_output(item, results, settings)
        assert "threads" in (folder / "tables.md").read_text()
        assert len(list(folder.glob("*.png"))) == 1
