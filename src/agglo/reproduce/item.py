"""What an item of the paper is: a table or a figure that is measured cell by cell.

A full run and one in miniature go through the same code; what differs are values that `Item.cells` reads: models, data
sets, keep rates, seeds. Everything an item finds is in its record, and its tables and pictures are made of that alone.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agglo.experiments.tables import Table

Result = dict[str, Any]  # of one cell: its `about`, what was found, the processor and the date
RunCell = Callable[["Cell"], dict[str, Any]]


class CannotRunError(ValueError):
    """A cell cannot be run, whatever the machine: a result, with its reason, and no failure."""


@dataclass(frozen=True)
class Need:
    """What an item cannot do without.

    kind: "data" or "weights", which a person names a place for; "extra", a package that Python can import.
    name: by which cells and the command line call it.
    about: what it is, in words.
    """

    kind: str
    name: str
    about: str

    def is_here(self, settings: Settings) -> bool:
        if self.kind == "extra":
            return find_spec(self.name) is not None
        return self.name in (settings.data if self.kind == "data" else settings.weights)


@dataclass(frozen=True)
class Settings:
    """What a person asks for.

    miniature: on the models and images that come with agglo, with everything smaller.
    data, weights: places by the names of needs.
    output: folder in which every item has one of its own.
    runs: folder for what training writes, of no use once the record holds its results.
    seeds: of every cell that chance has a part in; None is the item's own number.
    batch_size: None is the item's own number.
    released: train also as the released code behaves, where that differs from the paper.
    """

    miniature: bool = False
    data: Mapping[str, Path] = field(default_factory=dict)
    weights: Mapping[str, Path] = field(default_factory=dict)
    output: Path = Path("results")
    runs: Path = Path("runs/reproduce")
    seeds: int | None = None
    device: str = "cpu"
    batch_size: int | None = None
    released: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether training is kept from a GPU that is there."""
        return self.device == "cpu"

    def folder(self, item: str) -> Path:
        """Where an item's record, tables and pictures are."""
        return self.output / "miniature" / item if self.miniature else self.output / item

    def run_folder(self, item: str, *parts: str) -> Path:
        """Where training of an item's cell writes."""
        return self.runs / ("miniature" if self.miniature else "full") / item / Path(*parts)


@dataclass(frozen=True)
class Cell:
    """One value to be measured, once.

    about: what tells it from the other cells of its item: plain values, which are written to the record.
    needs: names of the needs without which it is left out.
    multiply_adds: of all its passes, for the estimate.
    """

    about: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    multiply_adds: float = 0.0

    @property
    def key(self) -> str:
        return key_of(self.about)

    @property
    def title(self) -> str:
        return ", ".join(str(value) for value in self.about.values() if value is not None)


def key_of(about: Mapping[str, Any]) -> str:
    """Equal for equal cells, whatever the order of their values."""
    return json.dumps(dict(about), sort_keys=True)


@dataclass(frozen=True)
class Section:
    """One table of an item's page. text: what a reader must know to read it, below the title."""

    title: str
    table: Table | None = None
    text: str = ""


class Item(ABC):
    """One item.

    name: as a person types it. shows: the table or figure, as the paper calls it. about: what it measures, in words.
    miniature_about: what stands in for what in miniature.
    in_full, in_miniature: whether there is such a run; a study of ours may have only one of them.
    """

    name: str
    shows: str
    about: str
    miniature_about: str = ""
    in_full: bool = True
    in_miniature: bool = True

    def is_offered(self, miniature: bool) -> bool:
        return self.in_miniature if miniature else self.in_full

    @abstractmethod
    def needs(self, miniature: bool) -> Sequence[Need]: ...

    @abstractmethod
    def cells(self, settings: Settings) -> Sequence[Cell]:
        """All of them, whether they can be run here or not; light enough for a listing."""

    @abstractmethod
    def open(self, settings: Settings) -> RunCell:
        """What runs cells one after the other, and may keep a model or images open between them.

        It returns what was found; raises CannotRunError for a cell that cannot be. Cells come in the order of `cells`.
        """

    @abstractmethod
    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        """Tables of what was measured so far, beside what is printed."""

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        """Pictures, written to a folder; their paths."""
        return ()

    def borrowed(self, settings: Settings) -> Sequence[Result]:
        """Results of other items that this one is made of."""
        return ()
