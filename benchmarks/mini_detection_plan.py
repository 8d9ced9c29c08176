"""What the detection in miniature measures: its cells, and what decides their numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agglo.experiments.variants import Variant
from agglo.methods import create
from agglo.reproduce.classifiers import Entry
from agglo.schedule import Counts

SHELF, TUNED, GATE = "off the shelf", "fine-tuned", "gate"
RANKED = (0.25, 0.5)  # keep rates; others are only reported
DENSE = Entry("dense", "none")
COLLAPSED = Entry("one token", "atc", "average")  # with a single token, all methods that merge are one

# Off the shelf come all that learn nothing; DPC-KNN learns the scores that its means are weighted by.
ENTRIES = (
    Entry("atc average", "atc", "average"),
    Entry("atc complete", "atc", "complete"),
    Entry("atc single", "atc", "single"),
    Entry("tome", "tome"),
    Entry("pool", "pool"),
    Entry("random", "random", options={"seed": 0}),
    Entry("kmedoids", "kmedoids"),
    Entry("dpc_knn equal", "dpc_knn", options={"weights": "equal"}),
    Entry("dpc_knn", "dpc_knn", learns=True),
    Entry("evit", "evit"),
    Entry("topk", "topk"),
    Entry("ats", "ats"),
    Entry("evovit", "evovit"),
    Entry("svit", "svit", learns=True),
    Entry("dynamicvit", "dynamicvit", learns=True),
    Entry("dynamicvit_prsv", "dynamicvit_prsv", learns=True),
)
SHELF_ENTRIES = tuple(entry for entry in ENTRIES if not entry.learns)
TUNED_ENTRIES = tuple(entry for entry in ENTRIES if entry.name != "dpc_knn equal")


@dataclass(frozen=True)
class Study:
    """Everything that decides what a cell finds, and where it is kept.

    scenes, epochs: of the dense training; tuning_scenes, tuning_epochs: of the fine-tuning of every method.
    validation: scenes that all cells are judged by. resamples: for intervals; these may change at any time.
    """

    data: Path
    runs: Path
    scenes: int = 4000
    epochs: int = 4
    tuning_scenes: int = 800
    tuning_epochs: int = 1
    validation: int = 1000
    resamples: int = 500

    @property
    def fixed(self) -> dict[str, int]:
        """What must be the same for all cells of one record."""
        names = ("scenes", "epochs", "tuning_scenes", "tuning_epochs", "validation")
        return {name: value for name, value in asdict(self).items() if name in names}

    def dense_run(self, seed: int) -> Path:
        return self.runs / f"seed{seed}" / "dense"

    def dense_weights(self, seed: int) -> Path:
        """The last weights, not the best: validation scenes choose nothing."""
        return self.dense_run(seed) / "last" / "model.safetensors"


@dataclass(frozen=True)
class Cell:
    """One number of the tables, as it can be sent to another process. rate: None for what has none."""

    part: str
    seed: int
    name: str
    rate: float | None = None

    @property
    def entry(self) -> Entry:
        return next(entry for entry in (DENSE, COLLAPSED, *ENTRIES) if entry.name == self.name)

    @property
    def key(self) -> dict[str, Any]:
        return {"part": self.part, "seed": self.seed, "name": self.name, "keep_rate": self.rate}

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f" {self.rate:.0%}"
        return f"seed {self.seed}, {self.part}: {self.name}{rate}"

    def folder(self, study: Study) -> Path:
        name = self.name.replace(" ", "-")
        part = self.part.replace(" ", "-")
        return study.runs / f"seed{self.seed}" / part / (name if self.rate is None else f"{name}-{self.rate:g}")

    def variant(self) -> Variant | None:
        """How tokens are reduced; None is the dense detector."""
        if self.entry.method == DENSE.method:
            return None
        method = create(self.entry.method, **self.entry.all_options)
        if self.part == GATE:
            return Variant(self.name, method, schedule=Counts((1,), blocks=(0,)))
        return Variant(self.name, method, keep_rate=self.rate)


@dataclass(frozen=True)
class Plan:
    """How far a study goes. Rates come in the order of what they tell."""

    seeds: int = 2
    shelf_rates: tuple[float, ...] = (0.5, 0.25, 0.7, 0.9)
    tuned_rates: tuple[float, ...] = (0.5, 0.25)

    def gate(self, seed: int) -> list[Cell]:
        return [Cell(SHELF, seed, DENSE.name), Cell(GATE, seed, COLLAPSED.name)]

    def stages(self) -> list[list[Cell]]:
        """What comes after the gates: for each rate the cells of all seeds, so that a study that is stopped early has
        the same rows for every seed."""
        shelf = [self._cells(SHELF, SHELF_ENTRIES, rate) for rate in self.shelf_rates]
        if not self.tuned_rates:
            return shelf
        dense = [Cell(TUNED, seed, DENSE.name) for seed in range(self.seeds)]
        return [*shelf, dense, *(self._cells(TUNED, TUNED_ENTRIES, rate) for rate in self.tuned_rates)]

    def cells(self, only: int | None = None) -> list[Cell]:
        """All in their order, or those of one seed."""
        gates = [cell for seed in range(self.seeds) for cell in self.gate(seed)]
        cells = [*gates, *(cell for stage in self.stages() for cell in stage)]
        return cells if only is None else [cell for cell in cells if cell.seed == only]

    def _cells(self, part: str, entries: tuple[Entry, ...], rate: float) -> list[Cell]:
        return [Cell(part, seed, entry.name, rate) for seed in range(self.seeds) for entry in entries]
