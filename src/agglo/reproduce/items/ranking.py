"""Figures that follow from the fine-tuned table alone: printed numbers give the paper's, measured ones ours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from agglo.drawing.charts import Bar, BarPanel, ColumnPanel, draw_bars, draw_columns
from agglo.experiments.tables import Column, Table
from agglo.reproduce import printed
from agglo.reproduce.classifiers import DENSE, OURS, PAPER, RATES
from agglo.reproduce.compare import percent
from agglo.reproduce.curves import accuracy_panels
from agglo.reproduce.derived import (
    HARD_MERGING,
    PRIOR,
    Grid,
    among,
    by_seed,
    differences,
    mean_ranks,
    measured_grid,
    printed_grid,
)
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.fine_tuned import tuned_results

_OF_PRINTED = "from the printed table"
_ALL = tuple(entry.name for entry in PAPER)


class Derived(Item):
    """Has no cells: what it shows is computed anew from the record of fine-tuned and from the printed table."""

    miniature_about = "From fine-tuned in miniature, beside what the paper's own table gives."

    def needs(self, miniature: bool) -> Sequence[Need]:
        return ()

    def cells(self, settings: Settings) -> Sequence[Cell]:
        return ()

    def open(self, settings: Settings) -> RunCell:
        raise AssertionError("there are no cells")

    def borrowed(self, settings: Settings) -> Sequence[Result]:
        return tuned_results(settings)

    def grids(self, settings: Settings, names: Sequence[str]) -> dict[str, Grid]:
        """By where the numbers come from. names: of the methods that are compared, in both the same ones."""
        measured = measured_grid(tuned_results(settings), names)
        expected = among(printed_grid(), names)
        return {"measured": measured, _OF_PRINTED: expected} if measured else {_OF_PRINTED: expected}

    @abstractmethod
    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]: ...


class AccuracyCurves(Derived):
    name = "accuracy-curves"
    shows = "figure iccvResults"
    about = (
        "Accuracy against keep rate of the methods that merge hard, fine-tuned; drawn from the record of fine-tuned "
        "and, for the paper's models, from the printed table; other methods are thin grey lines"
    )
    miniature_about = "Drawn from fine-tuned in miniature."

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        return ()

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        sources = {"accuracy.png": self.borrowed(settings)}
        if not settings.miniature:
            sources["as-printed.png"] = _as_results()
        drawn = [
            accuracy_panels(results, folder / name, faint=lambda name: name not in HARD_MERGING)
            for name, results in sources.items()
        ]
        return [path for paths in drawn for path in paths]


def _as_results() -> list[Result]:
    """The printed table as if it had been measured."""
    found: list[Result] = []
    for place, row in printed_grid().items():
        metric = "top1" if place.data in printed.IMAGES else "mAP"
        shown = {"model": place.model, "data": place.data}
        numbers = {DENSE: printed.value("fine-tuned", place.model, place.data, DENSE), **row}
        images = {"images": printed.IMAGES[place.data]} if metric == "top1" else {}
        found += [
            {**shown, "method": name, "keep_rate": place.keep_rate, metric: number, **images}
            for name, number in numbers.items()
        ]
    return found


class Rank(Derived):
    name = "rank"
    shows = "figure rankedICCV"
    about = "Mean rank of the methods that merge hard over keep rates, models and data sets; equals share their ranks"

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        grids = {source: mean_ranks(grid) for source, grid in self.grids(settings, HARD_MERGING).items()}
        said = printed.statement("rank")
        names = list(dict.fromkeys(name for of in grids.values() for name in of))
        columns = [Column("method", left=True), *map(Column, grids), Column("as the paper's figure has it")]
        rows = [
            [name, *(_spread(of.get(name)) for of in grids.values()), _spread(said.get(name))]
            for name in sorted(names, key=lambda name: said.get(name, [99])[0])
        ]
        note = "+- is the standard deviation over places. ToMe has no rank at 25 %, which it cannot reach."
        return [Section("Mean rank, 1 is best", Table(columns, rows), note)]

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        panels = [_panel(mean_ranks(grid), source) for source, grid in self.grids(settings, HARD_MERGING).items()]
        draw_bars(
            [panels], folder / "ranks.png", note="whiskers: standard deviation over keep rates, models, data sets"
        )
        return [folder / "ranks.png"]


class Difference(Derived):
    name = "difference"
    shows = "figure deltaICCV"
    about = "How far ATC is above the best prior method that merges hard, per keep rate, in points"

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        sections = []
        for soft, title in ((False, "that merges hard"), (True, "that merges hard or soft")):
            names = (*PRIOR[soft], *OURS)
            grids = {source: differences(grid, soft=soft) for source, grid in self.grids(settings, names).items()}
            seeds = [differences(grid, soft=soft) for grid in by_seed(tuned_results(settings), names).values()]
            said = printed.statement("difference with soft merging" if soft else "difference")
            columns = [Column("method", left=True)]
            columns += [Column(f"{percent(rate)} {source}", "+.2f") for rate in RATES for source in (*grids, "figure")]
            rows: list[list[Any]] = []
            for name in said:
                row: list[Any] = [name]
                for rate in RATES:
                    row += [of.get(name, {}).get(rate) for of in grids.values()]
                    row[-len(grids)] = _with_spread(
                        row[-len(grids)], [of[name][rate] for of in seeds if rate in of[name]]
                    )
                    row.append(said[name].get(str(rate)))
                rows.append(row)
            text = "In brackets the standard deviation over seeds, where there are several."
            sections.append(Section(f"Points above the best prior method {title}", Table(columns, rows), text))
        return sections

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        panels = []
        rates = _rates(self.grids(settings, HARD_MERGING))
        for source, grid in self.grids(settings, HARD_MERGING).items():
            found = differences(grid)
            series: dict[str, Sequence[float]] = {
                name: [of[rate] for rate in rates] for name, of in found.items() if of
            }
            label = "points above the best prior\nhard-merging method"
            panels.append(ColumnPanel([percent(rate) for rate in rates], series, "keep rate", label, source))
        draw_columns(panels, folder / "difference.png")
        return [folder / "difference.png"]


class RankingPerRate(Derived):
    name = "ranking-per-rate"
    shows = "figure avgRanking"
    about = "Mean rank at each keep rate over models and data sets, among the paper's sixteen methods"

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        said = printed.statement("ranking-per-rate")
        sections = []
        for rate in RATES:
            grids = {source: mean_ranks(grid, rate) for source, grid in self.grids(settings, _ALL).items()}
            names = list(dict.fromkeys(name for of in reversed(grids.values()) for name in of))
            columns = [
                Column("method", left=True),
                *(Column(source, ".2f") for source in grids),
                Column("figure", ".2f"),
            ]
            rows = [
                [name, *(of[name][0] if name in of else None for of in grids.values()), said[str(rate)].get(name)]
                for name in names
            ]
            sections.append(Section(f"Keep rate {percent(rate)}", Table(columns, rows)))
        return sections

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        rates = _rates(self.grids(settings, _ALL))
        rows = [
            [_panel(mean_ranks(grid, rate), f"{percent(rate)}, {source}") for rate in rates]
            for source, grid in self.grids(settings, _ALL).items()
        ]
        draw_bars(rows, folder / "ranking-per-rate.png", note="whiskers: deviation over models and data sets")
        return [folder / "ranking-per-rate.png"]


def _rates(grids: dict[str, Grid]) -> list[float]:
    """Keep rates that all have numbers of."""
    return [rate for rate in RATES if all(any(place.keep_rate == rate for place in grid) for grid in grids.values())]


def _with_spread(value: float | None, seeds: Sequence[float]) -> Any:
    return f"{value:+.2f} ({stdev(seeds):.2f})" if value is not None and len(seeds) > 1 else value


def _spread(value: Any) -> str | None:
    return None if value is None else f"{value[0]:.2f} +- {value[1]:.2f}"


def _panel(ranked: dict[str, tuple[float, float]], title: str) -> BarPanel:
    bars = [Bar(name, mean, mean - spread, mean + spread) for name, (mean, spread) in ranked.items()]
    return BarPanel([bars], "mean rank (1 is best)", title)


ITEMS = (AccuracyCurves(), Rank(), Difference(), RankingPerRate())
