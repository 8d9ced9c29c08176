"""Figures that follow from the fine-tuned table alone: ranks, and differences to the best prior method.

Printed numbers give the paper's figures, measured ones ours. These studies have no cells of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

from scipy.stats import rankdata

from agglo.drawing.charts import Bar, BarPanel, ColumnPanel, draw_bars, draw_columns
from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import DENSE, HARD, OURS, PAPER, RATES, SOFT
from agglo.lab.paper.compare import accuracy_panels, grouped, metric_of, percent
from agglo.lab.paper.items.fine_tuned import FINE_TUNED
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import Result, Section, Settings, Study
from agglo.utils.tables import Column, Table


class Place(NamedTuple):
    """One column of a table of accuracies."""

    model: str
    data: str
    keep_rate: float


Grid = Mapping[Place, Mapping[str, float]]  # accuracy by method; one that cannot is absent

# Those that ATC is compared with: methods that merge hard; and all that merge.
PRIOR = {False: HARD, True: (*HARD, *SOFT)}
HARD_MERGING = (*HARD, *OURS)
_ALL = tuple(entry.name for entry in PAPER)


def printed_grid() -> dict[Place, dict[str, float]]:
    """Return the paper's fine-tuned table."""
    grid: dict[Place, dict[str, float]] = {}
    for model, by_data in printed.table("fine-tuned")["values"].items():
        for data, by_method in by_data.items():
            for method, by_rate in by_method.items():
                if isinstance(by_rate, dict):  # not so for the dense model
                    for rate, number in by_rate.items():
                        if number is not None:
                            grid.setdefault(Place(model, data, float(rate)), {})[method] = number
    return grid


def by_seed(results: Sequence[Result], names: Sequence[str]) -> dict[int, dict[Place, dict[str, float]]]:
    """Return what was measured of some methods, a grid per seed.

    At each place only those seeds count that all methods have which were run there.
    """
    chosen = [r for r in results if r["keep_rate"] is not None and r["method"] in names]
    grids: dict[int, dict[Place, dict[str, float]]] = {}
    for place, here in grouped(chosen, "model", "data", "keep_rate").items():
        metric = metric_of(here)
        done = [result for result in here if metric in result]
        seeds = [{result["seed"] for result in of} for of in grouped(done, "method").values()]
        for seed in sorted(set.intersection(*seeds)) if seeds else ():
            row = {result["method"]: result[metric] for result in done if result["seed"] == seed}
            grids.setdefault(seed, {})[Place(*place)] = row
    return grids


def measured_grid(results: Sequence[Result], names: Sequence[str]) -> dict[Place, dict[str, float]]:
    """Return means over the seeds that methods have in common."""
    grids = by_seed(results, names)
    found: dict[Place, dict[str, float]] = {}
    for place in dict.fromkeys(place for grid in grids.values() for place in grid):
        rows = [grid[place] for grid in grids.values() if place in grid]
        found[place] = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return found


def among(grid: Grid, names: Sequence[str]) -> dict[Place, dict[str, float]]:
    """Return a grid with some methods only."""
    return {place: {name: row[name] for name in names if name in row} for place, row in grid.items()}


def ranks(grid: Grid) -> dict[str, dict[Place, float]]:
    """Rank every method at every place where it has a number, 1 the best; equals share the mean of their ranks."""
    found: dict[str, dict[Place, float]] = {}
    for place, row in grid.items():
        for name, rank in zip(row, rankdata([-number for number in row.values()]), strict=True):
            found.setdefault(name, {})[place] = float(rank)
    return found


def mean_ranks(grid: Grid, keep_rate: float | None = None) -> dict[str, tuple[float, float]]:
    """Return mean and deviation of each method's ranks, over all places or those of one keep rate; best first."""
    chosen = {place: row for place, row in grid.items() if keep_rate in (None, place.keep_rate)}
    found = {name: list(of.values()) for name, of in ranks(chosen).items()}
    means = {name: (fmean(values), pstdev(values)) for name, values in found.items()}
    return dict(sorted(means.items(), key=lambda entry: entry[1]))


def differences(grid: Grid, *, soft: bool = False) -> dict[str, dict[float, float]]:
    """Return how far each linkage of ATC is above the best prior method that merges hard, or hard or soft.

    The mean over models and data sets at each keep rate.
    """
    found: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    for place, row in grid.items():
        before = [row[name] for name in PRIOR[soft] if name in row]
        for name in OURS:
            if before and name in row:
                found[name].setdefault(place.keep_rate, []).append(row[name] - max(before))
    return {name: {rate: fmean(values) for rate, values in sorted(of.items())} for name, of in found.items()}


def _grids(results: Sequence[Result], names: Sequence[str]) -> dict[str, Grid]:
    """Return grids of the same methods by where the numbers come from."""
    measured, expected = measured_grid(results, names), among(printed_grid(), names)
    return {**({"measured": measured} if measured else {}), "from the printed table": expected}


def _rates(grids: Mapping[str, Grid]) -> list[float]:
    """Return the keep rates of which all grids have numbers."""
    return [rate for rate in RATES if all(any(place.keep_rate == rate for place in grid) for grid in grids.values())]


def _rank_table(results: Sequence[Result], scale: Any) -> list[Section]:
    grids = {source: mean_ranks(grid) for source, grid in _grids(results, HARD_MERGING).items()}
    said = printed.statement("rank")
    names = list(dict.fromkeys(name for of in grids.values() for name in of))
    columns = [Column("method", left=True), *map(Column, grids), Column("as the paper's figure has it")]
    rows = [
        [name, *(_spread(of.get(name)) for of in grids.values()), _spread(said.get(name))]
        for name in sorted(names, key=lambda name: said.get(name, [99])[0])
    ]
    note = "+- is the standard deviation over places. ToMe has no rank at 25 %, which it cannot reach."
    return [Section("Mean rank, 1 is best", Table(columns, rows), note)]


def _spread(value: Any) -> str | None:
    return None if value is None else f"{value[0]:.2f} +- {value[1]:.2f}"


def _difference_table(results: Sequence[Result], scale: Any) -> list[Section]:
    sections = []
    for soft, title in ((False, "that merges hard"), (True, "that merges hard or soft")):
        names = (*PRIOR[soft], *OURS)
        grids = {source: differences(grid, soft=soft) for source, grid in _grids(results, names).items()}
        seeds = [differences(grid, soft=soft) for grid in by_seed(results, names).values()]
        said = printed.statement("difference with soft merging" if soft else "difference")
        columns = [Column("method", left=True)]
        columns += [Column(f"{percent(rate)} {source}", "+.2f") for rate in RATES for source in (*grids, "figure")]
        rows: list[list[Any]] = []
        for name in said:
            row: list[Any] = [name]
            for rate in RATES:
                here = [of.get(name, {}).get(rate) for of in grids.values()]
                by_one = [of[name][rate] for of in seeds if rate in of[name]]
                if here[0] is not None and len(by_one) > 1:
                    here[0] = f"{here[0]:+.2f} ({stdev(by_one):.2f})"  # type: ignore[call-overload]
                row += [*here, said[name].get(str(rate))]
            rows.append(row)
        text = "In brackets the standard deviation over seeds, where there are several."
        sections.append(Section(f"Points above the best prior method {title}", Table(columns, rows), text))
    return sections


def _per_rate_table(results: Sequence[Result], scale: Any) -> list[Section]:
    said = printed.statement("ranking-per-rate")
    sections = []
    for rate in RATES:
        grids = {source: mean_ranks(grid, rate) for source, grid in _grids(results, _ALL).items()}
        names = list(dict.fromkeys(name for of in reversed(grids.values()) for name in of))
        columns = [Column("method", left=True), *(Column(source, ".2f") for source in (*grids, "figure"))]
        rows = [
            [name, *(of[name][0] if name in of else None for of in grids.values()), said[str(rate)].get(name)]
            for name in names
        ]
        sections.append(Section(f"Keep rate {percent(rate)}", Table(columns, rows)))
    return sections


def _bars(ranked: dict[str, tuple[float, float]], title: str) -> BarPanel:
    bars = [Bar(name, mean, mean - spread, mean + spread) for name, (mean, spread) in ranked.items()]
    return BarPanel([bars], "mean rank (1 is best)", title)


def _draw_accuracy(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    sources = {"accuracy.png": results}
    if not settings.miniature:
        sources["as-printed.png"] = _as_results()
    return [
        path
        for name, here in sources.items()
        for path in accuracy_panels(here, folder / name, faint=lambda name: name not in HARD_MERGING)
    ]


def _as_results() -> list[Result]:
    """Return the printed table as if it had been measured."""
    found: list[Result] = []
    for place, row in printed_grid().items():
        metric = "top1" if place.data in printed.IMAGES else "mAP"
        numbers = {DENSE: printed.value("fine-tuned", place.model, place.data, DENSE), **row}
        images = {"images": printed.IMAGES[place.data]} if metric == "top1" else {}
        found += [{**place._asdict(), "method": name, metric: number, **images} for name, number in numbers.items()]
    return found


def _draw_rank(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    panels = [_bars(mean_ranks(grid), source) for source, grid in _grids(results, HARD_MERGING).items()]
    draw_bars([panels], folder / "ranks.png", note="whiskers: standard deviation over keep rates, models, data sets")
    return [folder / "ranks.png"]


def _draw_difference(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    grids = _grids(results, HARD_MERGING)
    rates, panels = _rates(grids), []
    for source, grid in grids.items():
        found = differences(grid)
        series: dict[str, Sequence[float]] = {name: [of[rate] for rate in rates] for name, of in found.items() if of}
        label = "points above the best prior\nhard-merging method"
        panels.append(ColumnPanel([percent(rate) for rate in rates], series, "keep rate", label, source))
    draw_columns(panels, folder / "difference.png")
    return [folder / "difference.png"]


def _draw_per_rate(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    grids = _grids(results, _ALL)
    rows = [
        [_bars(mean_ranks(grid, rate), f"{percent(rate)}, {source}") for rate in _rates(grids)]
        for source, grid in grids.items()
    ]
    draw_bars(rows, folder / "ranking-per-rate.png", note="whiskers: deviation over models and data sets")
    return [folder / "ranking-per-rate.png"]


def _no_cell(about: Mapping[str, Any]) -> dict[str, Any]:
    raise AssertionError("there are no cells")


def _derived(name: str, shows: str, about: str, table: Callable[..., Any], draw: Callable[..., Any]) -> Study:
    stands_in = "From fine-tuned in miniature, beside what the paper's own table gives."
    if name == "accuracy-curves":
        stands_in = "Drawn from fine-tuned in miniature."
    return Study(
        name=name,
        shows=shows,
        about=about,
        stands_in=stands_in,
        full=(),
        miniature=(),
        axes=lambda scale, settings: (),
        run=lambda scale, settings: _no_cell,
        table=table,
        draw=draw,
        borrow=lambda settings: read_results(settings.folder(FINE_TUNED.name)),
    )


ITEMS = (
    _derived(
        "accuracy-curves",
        "figure iccvResults",
        "Accuracy against keep rate of the methods that merge hard, fine-tuned; drawn from the record of fine-tuned "
        "and, for the paper's models, from the printed table; other methods are thin grey lines",
        lambda results, scale: (),
        _draw_accuracy,
    ),
    _derived(
        "rank",
        "figure rankedICCV",
        "Mean rank of the methods that merge hard over keep rates, models and data sets; equals share their ranks",
        _rank_table,
        _draw_rank,
    ),
    _derived(
        "difference",
        "figure deltaICCV",
        "How far ATC is above the best prior method that merges hard, per keep rate, in points",
        _difference_table,
        _draw_difference,
    ),
    _derived(
        "ranking-per-rate",
        "figure avgRanking",
        "Mean rank at each keep rate over models and data sets, among the paper's sixteen methods",
        _per_rate_table,
        _draw_per_rate,
    ),
)
