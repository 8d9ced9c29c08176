"""A study: a table or a figure of the paper, measured cell by cell.

A full run and one in miniature go through the same code; what differs is one value, the scale: models, data sets, keep
rates, seeds. Tables and figures are made of a study's record and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from agglo.utils.journal import key_of
from agglo.utils.tables import Table

Result = dict[str, Any]  # of one cell: its `about`, what was found, the processor and the date
RunCell = Callable[[Mapping[str, Any]], dict[str, Any]]  # from the `about` of a cell to what was found


class CannotRunError(ValueError):
    """A cell cannot be run, whatever the machine: a result, with its reason, and no failure."""


class Need(NamedTuple):
    """What a cell cannot do without: "data" or "weights", whose path the user gives, or a package, an "extra"."""

    kind: str
    name: str
    about: str

    def is_available(self, settings: Settings) -> bool:
        if self.kind == "extra":
            return find_spec(self.name) is not None
        return self.name in (settings.data if self.kind == "data" else settings.weights)


@dataclass(frozen=True)
class Settings:
    """What the user asks for."""

    miniature: bool = False  # run on the models and images that come with agglo, with everything smaller
    data: Mapping[str, Path] = field(default_factory=dict)  # paths by the names of needs
    weights: Mapping[str, Path] = field(default_factory=dict)
    output: Path = Path("results")  # folder of the folders of all studies
    runs: Path = Path("runs/reproduce")  # what training writes, of no use once the record holds its results
    seeds: int | None = None  # None is the study's own number, here and of the batch size
    device: str = "cpu"
    batch_size: int | None = None

    def folder(self, study: str) -> Path:
        """Return the folder of a study's record, tables and figures."""
        return self.output / "miniature" / study if self.miniature else self.output / study

    def run_folder(self, study: str, *parts: str) -> Path:
        """Return the folder that training of a study's cell writes to."""
        return self.runs / ("miniature" if self.miniature else "full") / study / Path(*parts)


class StudyCell(NamedTuple):
    """One value to be measured, once. Without its needs it is left out.

    `about` distinguishes it from the other cells of its study: plain values, which are written to the record.
    """

    about: Mapping[str, Any]
    needs: tuple[Need, ...] = ()

    @property
    def key(self) -> str:
        return key_of(self.about)


class Section(NamedTuple):
    """One table of a study's page. `text` below the title is what a reader must know to read it."""

    title: str
    table: Table | None = None
    text: str = ""


@dataclass(frozen=True)
class Study:
    """A table or a figure."""

    name: str
    shows: str  # the table or figure, as the paper calls it
    about: str  # what it measures
    full: Any  # the scale of a run: whatever value its functions read; None where there is no such run
    miniature: Any
    axes: Callable[[Any, Settings], Iterable[StudyCell]]  # all cells, whether they can be run here or not
    # From a scale and settings to what measures one cell after the other, in the order of `axes`; it may keep a model
    # or images open between them, and raises CannotRunError for a cell that cannot be measured.
    run: Callable[[Any, Settings], RunCell]
    table: Callable[[Sequence[Result], Any], Sequence[Section]]  # of what was measured so far
    draw: Callable[[Sequence[Result], Any, Settings, Path], Sequence[Path]] = lambda *_: ()  # figures, into a folder
    gpu_hours: str = "none"  # an estimate for the full run; `registry.GPU_HOURS` says how it is made
    stands_in: str = ""  # what stands in for what in miniature
    optional: tuple[Need, ...] = ()  # needs that no cell has, but which change how cells are measured
    # Results of other studies, which `table` and `draw` get before this study's own.
    borrow: Callable[[Settings], Sequence[Result]] = lambda _: ()
    command: str = "agglo reproduce"

    def scale(self, miniature: bool) -> Any:
        return self.miniature if miniature else self.full

    def is_offered(self, miniature: bool) -> bool:
        return self.scale(miniature) is not None

    def cells(self, settings: Settings) -> list[StudyCell]:
        return list(self.axes(self.scale(settings.miniature), settings)) if self.is_offered(settings.miniature) else []

    def needs(self, miniature: bool) -> list[Need]:
        """Return the needs of all cells: data, then weights, then packages."""
        needs = [need for cell in self.cells(Settings(miniature=miniature)) for need in cell.needs]
        needs += () if miniature else self.optional
        return sorted(dict.fromkeys(needs), key=lambda need: ("data", "weights", "extra").index(need.kind))

    def open(self, settings: Settings) -> RunCell:
        return self.run(self.scale(settings.miniature), settings)
