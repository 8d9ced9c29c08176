"""A study that costs nothing, to test what all studies share. `python -m tests.lab.paper.toy FOLDER` runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agglo.lab.paper import compare
from agglo.lab.paper.runner import run
from agglo.lab.paper.study import CannotRunError, Need, Result, RunCell, Section, Settings, Study, StudyCell

RATES = (0.25, 0.5)
TOYS, BEAR = Need("data", "toys", "a box of toys"), Need("weights", "bear", "a bear")


class Ran:
    """Notes the cells that ran. Top-1 is the keep rate in percent plus the seed; tome cannot do 0.25, big is large."""

    def __init__(self, fails_at: tuple[Any, ...] | None = None) -> None:
        self.cells: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def study(self, name: str = "toy") -> Study:
        about: dict[str, Any] = {"name": name, "shows": "table of toys", "about": "Nothing"}
        about |= {"stands_in": "Less than nothing.", "full": (TOYS,), "miniature": (), "gpu_hours": "0.2"}
        return Study(**about, axes=_axes, run=self.open, table=_table, draw=_draw)

    def open(self, needs: tuple[Need, ...], settings: Settings) -> RunCell:
        def run(about: Mapping[str, Any]) -> dict[str, Any]:
            place = tuple(about.values())
            if place == self.fails_at:
                raise KeyboardInterrupt
            self.cells.append(place)
            if about["method"] == "big":
                raise torch.OutOfMemoryError("2 TiB were asked for")
            if about["method"] == "tome" and about["keep_rate"] < 0.5:
                raise CannotRunError("tome merges pairs")
            return {"top1": 100 * about["keep_rate"] + about["seed"], "images": 100}

        return run


def _axes(needs: tuple[Need, ...], settings: Settings) -> list[StudyCell]:
    cases = [(m, rate, s) for m in ("atc", "tome") for rate in RATES for s in range(settings.seeds or 1)]
    cells = [StudyCell({"method": m, "keep_rate": rate, "seed": s}, needs) for m, rate, s in cases]
    return [*cells, StudyCell({"method": "big", "keep_rate": 0.5, "seed": 0}, (*needs, *([BEAR] if needs else [])))]


def _table(results: Sequence[Result], needs: tuple[Need, ...]) -> list[Section]:
    def printed(row: str, rate: float) -> compare.Value | None:
        return compare.Value(55.5, 0.22) if (row, rate) == ("atc", 0.5) else None

    found = compare.by_method(results, "keep_rate", "top1", expected=printed)
    return [Section("Toys", replace(found, columns=RATES).table())]


def _draw(results: Sequence[Result], needs: tuple[Need, ...], settings: Settings, folder: Path) -> list[Path]:
    (folder / "toy.png").write_bytes(b"a picture")
    return [folder / "toy.png"]


def toy() -> Study:
    return Ran().study()


if __name__ == "__main__":
    run(toy(), Settings(miniature=True, output=Path(sys.argv[1])))
