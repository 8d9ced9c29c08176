"""An item that costs nothing, to test what all items share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from agglo.reproduce.compare import beside, over_seeds, percent, printed_value
from agglo.reproduce.item import CannotRunError, Cell, Item, Need, Result, RunCell, Section, Settings

RATES = (0.25, 0.5)


class Toy(Item):
    """Top-1 is 10 times the number of the cell, plus the seed; tome cannot do 0.25, big does not fit."""

    name, shows, about = "toy", "table of toys", "Nothing"
    miniature_about = "Less than nothing."

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails_at: str | None = None

    def needs(self, miniature: bool) -> Sequence[Need]:
        return () if miniature else (Need("data", "toys", "a box of toys"), Need("weights", "bear", "a bear"))

    def cells(self, settings: Settings) -> Sequence[Cell]:
        needs = () if settings.miniature else ("toys",)
        cells = [
            Cell({"method": method, "keep_rate": rate, "seed": seed}, needs, multiply_adds=1e15)
            for method in ("atc", "tome")
            for rate in RATES
            for seed in range(settings.seeds or 1)
        ]
        return [*cells, Cell({"method": "big", "keep_rate": 0.5, "seed": 0}, (*needs, *(("bear",) if needs else ())))]

    def open(self, settings: Settings) -> RunCell:
        def run(cell: Cell) -> dict[str, float]:
            if cell.title == self.fails_at:
                raise KeyboardInterrupt
            self.ran.append(cell.title)
            if cell.about["method"] == "big":
                raise torch.OutOfMemoryError("2 TiB were asked for")
            if cell.about["method"] == "tome" and cell.about["keep_rate"] < 0.5:
                raise CannotRunError("tome merges pairs")
            return {"top1": 100 * cell.about["keep_rate"] + cell.about["seed"], "images": 100}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        def measured(row: str, rate: float) -> object:
            return over_seeds([r for r in results if (r["method"], r["keep_rate"]) == (row, rate)], "top1")

        def printed(row: str, rate: float) -> object:
            return printed_value(55.5, 50_000) if (row, rate) == ("atc", 0.5) else None

        rows = ["atc", "tome", "big"]
        return [Section("Toys", beside("method", rows, RATES, measured, printed, percent))]  # type: ignore[arg-type]

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        (folder / "toy.png").write_bytes(b"a picture")
        return [folder / "toy.png"]
