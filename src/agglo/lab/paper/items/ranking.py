"""Figures that follow from the fine-tuned table alone: ranks, and differences to the best prior method.

Printed numbers give the paper's figures, measured ones ours. These studies have no cells of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

from scipy.stats import rankdata

from agglo.drawing.charts import Bar, BarPanel, Curve, CurvePanel, draw_bars, draw_curves
from agglo.lab.paper import compare, printed
from agglo.lab.paper.classifiers import HARD, OURS, PAPER, RATES, SOFT
from agglo.lab.paper.compare import DENSE, percent
from agglo.lab.paper.items.fine_tuned import FINE_TUNED
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import Result, Section, Settings, Study
from agglo.utils.tables import Column, Table


class Setting(NamedTuple):
    """One column of a table of accuracies."""

    model: str
    data: str
    keep_rate: float


Grid = dict[Setting, dict[str, float]]  # accuracy by method; one that cannot is absent

# Those that ATC is compared with: methods that merge hard; and all that merge.
PRIOR = {False: HARD, True: (*HARD, *SOFT)}
HARD_MERGING = (*HARD, *OURS)
ALL = tuple(entry.name for entry in PAPER)


def printed_grid(names: Sequence[str] = ALL) -> Grid:
    """Return the paper's fine-tuned table, of some methods."""
    grid: Grid = {}
    for model, by_data in printed.table("fine-tuned")["values"].items():
        for data, by_method in by_data.items():
            for rate in RATES:
                row = {name: by_method[name][str(rate)] for name in names}
                grid[Setting(model, data, rate)] = {name: value for name, value in row.items() if value is not None}
    return grid


def by_seed(results: Sequence[Result], names: Sequence[str]) -> dict[int, Grid]:
    """Return what was measured of some methods, a grid per seed.

    In each setting only those seeds count that all methods have which were run there.
    """
    chosen = [r for r in results if r["keep_rate"] is not None and r["method"] in names]
    grids: dict[int, Grid] = {}
    for setting, here in compare.grouped(chosen, "model", "data", "keep_rate").items():
        metric = compare.metric_of(here)
        done = [result for result in here if metric in result]
        seeds = [{result["seed"] for result in of} for of in compare.grouped(done, "method").values()]
        for seed in sorted(set.intersection(*seeds)) if seeds else ():
            row = {result["method"]: result[metric] for result in done if result["seed"] == seed}
            grids.setdefault(seed, {})[Setting(*setting)] = row
    return grids


def measured_grid(results: Sequence[Result], names: Sequence[str]) -> Grid:
    """Return means over the seeds that methods have in common."""
    found: dict[Setting, dict[str, list[float]]] = {}
    for grid in by_seed(results, names).values():
        for setting, row in grid.items():
            for name, value in row.items():
                found.setdefault(setting, {}).setdefault(name, []).append(value)
    return {setting: {name: fmean(values) for name, values in row.items()} for setting, row in found.items()}


def mean_ranks(grid: Grid, keep_rate: float | None = None) -> dict[str, tuple[float, float]]:
    """Return mean and deviation of each method's ranks, over all settings or those of one keep rate; best first.

    1 is the best; equals share the mean of their ranks.
    """
    found: dict[str, list[float]] = {}
    for setting, row in grid.items():
        if keep_rate in (None, setting.keep_rate):
            for name, rank in zip(row, rankdata([-number for number in row.values()]), strict=True):
                found.setdefault(name, []).append(float(rank))
    means = {name: (fmean(values), pstdev(values)) for name, values in found.items()}
    return dict(sorted(means.items(), key=lambda entry: entry[1]))


def differences(grid: Grid, *, soft: bool = False) -> dict[str, dict[float, float]]:
    """Return how far each linkage of ATC is above the best prior method that merges hard, or hard or soft.

    The mean over models and data sets at each keep rate.
    """
    found: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    for setting, row in grid.items():
        before = [row[name] for name in PRIOR[soft] if name in row]
        for name in OURS:
            if before and name in row:
                found[name].setdefault(setting.keep_rate, []).append(row[name] - max(before))
    return {name: {rate: fmean(values) for rate, values in sorted(of.items())} for name, of in found.items()}


def _grids(results: Sequence[Result], names: Sequence[str]) -> dict[str, Grid]:
    """Return grids of the same methods by where the numbers come from."""
    measured = measured_grid(results, names)
    return {**({"measured": measured} if measured else {}), "from the printed table": printed_grid(names)}


def _rates(grids: Mapping[str, Grid]) -> list[float]:
    """Return the keep rates of which all grids have numbers."""
    return [rate for rate in RATES if all(any(key.keep_rate == rate for key in grid) for grid in grids.values())]


def _rank_table(results: Sequence[Result], scale: Any) -> list[Section]:
    figure = {name: tuple(value) for name, value in printed.statement("rank").items()}
    sources: dict[str, Mapping[str, tuple[float, float]]] = {
        **{source: mean_ranks(grid) for source, grid in _grids(results, HARD_MERGING).items()},
        "as the paper's figure has it": figure,
    }
    rows = [
        [name, *(f"{of[name][0]:.2f} +- {of[name][1]:.2f}" if name in of else None for of in sources.values())]
        for name in sorted(figure, key=lambda name: figure[name][0])
    ]
    note = "+- is the standard deviation over places. ToMe has no rank at 25 %, which it cannot reach."
    return [Section("Mean rank, 1 is best", Table([Column("method", left=True), *map(Column, sources)], rows), note)]


def _difference_table(results: Sequence[Result], scale: Any) -> list[Section]:
    sections = []
    for soft, title in ((False, "that merges hard"), (True, "that merges hard or soft")):
        names = (*PRIOR[soft], *OURS)
        grids = {source: differences(grid, soft=soft) for source, grid in _grids(results, names).items()}
        seeds = [differences(grid, soft=soft) for grid in by_seed(results, names).values()]
        figure = printed.statement("difference with soft merging" if soft else "difference")
        columns = [Column("method", left=True)]
        columns += [Column(f"{percent(rate)} {source}", "+.2f") for rate in RATES for source in (*grids, "figure")]
        rows: list[list[Any]] = []
        for name in figure:
            row: list[Any] = [name]
            for rate in RATES:
                here: list[Any] = [of.get(name, {}).get(rate) for of in grids.values()]
                single = [of[name][rate] for of in seeds if rate in of[name]]
                if here[0] is not None and len(single) > 1:
                    here[0] = f"{here[0]:+.2f} ({stdev(single):.2f})"
                row += [*here, figure[name].get(str(rate))]
            rows.append(row)
        text = "In brackets the standard deviation over seeds, where there are several."
        sections.append(Section(f"Points above the best prior method {title}", Table(columns, rows), text))
    return sections


def _per_rate_table(results: Sequence[Result], scale: Any) -> list[Section]:
    sections = []
    for rate in RATES:
        figure = printed.statement("ranking-per-rate")[str(rate)]
        grids = {source: mean_ranks(grid, rate) for source, grid in _grids(results, ALL).items()}
        names = list(dict.fromkeys(name for of in reversed(grids.values()) for name in of))
        columns = [Column("method", left=True), *(Column(source, ".2f") for source in (*grids, "figure"))]
        ranks = [[of[name][0] if name in of else None for of in grids.values()] for name in names]
        rows = [[name, *own, figure.get(name)] for name, own in zip(names, ranks, strict=True)]
        sections.append(Section(f"Keep rate {percent(rate)}", Table(columns, rows)))
    return sections


def _draw_accuracy(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    sources = {"accuracy.png": results}
    if not settings.miniature:
        sources["as-printed.png"] = _printed_results()
    return [
        path
        for name, here in sources.items()
        for path in compare.draw_accuracy(here, folder / name, faint=lambda name: name not in HARD_MERGING)
    ]


def _printed_results() -> list[Result]:
    """Return the printed table as if it had been measured."""
    found: list[Result] = []
    for setting, row in printed_grid().items():
        images = printed.IMAGES.get(setting.data)
        metric = "mAP" if images is None else "top1"
        numbers = {DENSE: printed.value("fine-tuned", setting.model, setting.data, DENSE), **row}
        about = {**setting._asdict(), "images": images}
        found += [{**about, "method": name, metric: number} for name, number in numbers.items()]
    return found


def _bars(ranked: dict[str, tuple[float, float]], title: str) -> BarPanel:
    bars = [Bar(name, mean, mean - spread, mean + spread) for name, (mean, spread) in ranked.items()]
    return BarPanel([bars], "mean rank (1 is best)", title)


def _draw_rank(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    panels = [_bars(mean_ranks(grid), source) for source, grid in _grids(results, HARD_MERGING).items()]
    draw_bars([panels], folder / "ranks.png", note="whiskers: standard deviation over keep rates, models, data sets")
    return [folder / "ranks.png"]


def _draw_difference(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    grids = _grids(results, HARD_MERGING)
    rates, panels = _rates(grids), []
    for source, grid in grids.items():
        curves = [Curve(name, rates, [of[rate] for rate in rates]) for name, of in differences(grid).items() if of]
        label = "points above the best prior\nhard-merging method"
        panels.append(CurvePanel(curves, "keep rate", label, title=source, x_ticks=rates))
    draw_curves(panels, folder / "difference.png")
    return [folder / "difference.png"]


def _draw_per_rate(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    grids = _grids(results, ALL)
    rows = [
        [_bars(mean_ranks(grid, rate), f"{percent(rate)}, {source}") for rate in _rates(grids)]
        for source, grid in grids.items()
    ]
    draw_bars(rows, folder / "ranking-per-rate.png", note="whiskers: deviation over models and data sets")
    return [folder / "ranking-per-rate.png"]


def _derived(name: str, shows: str, about: str, table: Callable[..., Any], draw: Callable[..., Any]) -> Study:
    drawn = "Drawn from fine-tuned in miniature."
    beside = "From fine-tuned in miniature, beside what the paper's own table gives."
    return Study(
        name=name,
        shows=shows,
        about=about,
        stands_in=drawn if name == "accuracy-curves" else beside,
        full=(),
        miniature=(),
        axes=lambda scale, settings: (),
        run=lambda scale, settings: dict,  # there are no cells
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
