"""Figures that follow from the fine-tuned table alone: ranks, and differences to the best prior method.

Printed numbers give the paper's figures, measured ones ours. These studies have no cells of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from scipy.stats import rankdata

from agglo.drawing.charts import Bar, BarPanel, Curve, CurvePanel, draw_bars, draw_curves
from agglo.lab.paper import compare, printed
from agglo.lab.paper.classifiers import HARD, OURS, PAPER, RATES, SOFT
from agglo.lab.paper.compare import DENSE, percent
from agglo.lab.paper.items.fine_tuned import FINE_TUNED
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import Result, Section, Settings, Study
from agglo.utils.tables import Column, Table

Accuracies = dict[tuple[str, str, float], dict[str, float]]  # by model, data and keep rate, then by method

# What ATC is compared with: methods that merge hard; and all that merge.
PRIOR = {False: HARD, True: (*HARD, *SOFT)}
HARD_MERGING = (*HARD, *OURS)
ALL = tuple(entry.name for entry in PAPER)


def printed_accuracies(names: Sequence[str] = ALL) -> Accuracies:
    """Return the paper's fine-tuned table, of some methods."""
    return {
        (model, data, rate): {name: by_method[name][str(rate)] for name in names if by_method[name][str(rate)]}
        for model, by_data in printed.table("fine-tuned")["values"].items()
        for data, by_method in by_data.items()
        for rate in RATES
    }


def by_seed(results: Sequence[Result], names: Sequence[str]) -> dict[int, Accuracies]:
    """Return what was measured of some methods, by seed.

    For each model, data and keep rate only those seeds count that all methods have which were run there.
    """
    chosen = [r for r in results if r["keep_rate"] is not None and r["method"] in names]
    found: dict[int, Accuracies] = {}
    for (model, data, rate), here in compare.grouped(chosen, "model", "data", "keep_rate").items():
        metric = compare.metric_of(here)
        done = [result for result in here if metric in result]
        seeds = [{result["seed"] for result in of} for of in compare.grouped(done, "method").values()]
        for seed in sorted(set.intersection(*seeds)) if seeds else ():
            row = {result["method"]: result[metric] for result in done if result["seed"] == seed}
            found.setdefault(seed, {})[model, data, rate] = row
    return found


def measured_accuracies(results: Sequence[Result], names: Sequence[str]) -> Accuracies:
    """Return means over the seeds that methods have in common."""
    tables = by_seed(results, names).values()
    found: Accuracies = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        rows = [table[key] for table in tables if key in table]
        found[key] = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return found


def mean_ranks(table: Accuracies, keep_rate: float | None = None) -> dict[str, tuple[float, float]]:
    """Return mean and deviation of each method's ranks, best first; of one keep rate or of all.

    1 is the best; equals share the mean of their ranks.
    """
    found: dict[str, list[float]] = {}
    for (_, _, rate), row in table.items():
        if keep_rate in (None, rate):
            for name, rank in zip(row, rankdata([-number for number in row.values()]), strict=True):
                found.setdefault(name, []).append(float(rank))
    means = {name: (fmean(values), pstdev(values)) for name, values in found.items()}
    return dict(sorted(means.items(), key=lambda entry: entry[1]))


def differences(table: Accuracies, *, soft: bool = False) -> dict[str, dict[float, float]]:
    """Return the points by which each linkage of ATC is ahead of the best prior method, at each keep rate.

    The mean over models and data sets. Prior methods merge hard, or hard or soft.
    """
    found: dict[str, dict[float, list[float]]] = {name: {} for name in OURS}
    for (_, _, rate), row in table.items():
        before = [row[name] for name in PRIOR[soft] if name in row]
        for name in OURS:
            if before and name in row:
                found[name].setdefault(rate, []).append(row[name] - max(before))
    return {name: {rate: fmean(values) for rate, values in sorted(of.items())} for name, of in found.items()}


def _sources(results: Sequence[Result], names: Sequence[str]) -> dict[str, Accuracies]:
    """Return accuracies of the same methods, measured and printed."""
    measured = measured_accuracies(results, names)
    return {**({"measured": measured} if measured else {}), "from the printed table": printed_accuracies(names)}


def _rates(sources: Mapping[str, Accuracies]) -> list[float]:
    """Return the keep rates of which all sources have numbers."""
    return [rate for rate in RATES if all(any(rate in key for key in of) for of in sources.values())]


def _rank_table(results: Sequence[Result], scale: Any) -> list[Section]:
    figure = printed.statement("rank")
    sources = {source: mean_ranks(table) for source, table in _sources(results, HARD_MERGING).items()}
    sources["as the paper's figure has it"] = figure
    rows = [
        [name, *("{:.2f} +- {:.2f}".format(*of[name]) if name in of else None for of in sources.values())]
        for name in sorted(figure, key=figure.get)
    ]
    note = "+- is the standard deviation over places. ToMe has no rank at 25 %, which it cannot reach."
    return [Section("Mean rank, 1 is best", Table([Column("method", left=True), *map(Column, sources)], rows), note)]


def _difference_table(results: Sequence[Result], scale: Any) -> list[Section]:
    sections = []
    for soft, title in ((False, "that merges hard"), (True, "that merges hard or soft")):
        names = (*PRIOR[soft], *OURS)
        sources = {source: differences(table, soft=soft) for source, table in _sources(results, names).items()}
        seeds = [differences(table, soft=soft) for table in by_seed(results, names).values()]
        figure = printed.statement("difference with soft merging" if soft else "difference")
        columns = [Column("method", left=True)]
        columns += [Column(f"{percent(rate)} {source}", "+.2f") for rate in RATES for source in (*sources, "figure")]
        rows: list[list[Any]] = [[name] for name in figure]
        for row, name in zip(rows, figure, strict=True):
            for rate in RATES:
                here: list[Any] = [of[name].get(rate) for of in sources.values()]
                single = [of[name][rate] for of in seeds if rate in of[name]]
                if here[0] is not None and len(single) > 1:
                    here[0] = f"{here[0]:+.2f} ({stdev(single):.2f})"
                row += [*here, figure[name].get(str(rate))]
        text = "In brackets the standard deviation over seeds, where there are several."
        sections.append(Section(f"Points above the best prior method {title}", Table(columns, rows), text))
    return sections


def _per_rate_table(results: Sequence[Result], scale: Any) -> list[Section]:
    sections = []
    for rate in RATES:
        figure = printed.statement("ranking-per-rate")[str(rate)]
        sources = {source: mean_ranks(table, rate) for source, table in _sources(results, ALL).items()}
        names = list(dict.fromkeys(name for of in reversed(sources.values()) for name in of))
        columns = [Column("method", left=True), *(Column(source, ".2f") for source in (*sources, "figure"))]
        ranks = [[of[name][0] if name in of else None for of in sources.values()] for name in names]
        rows = [[name, *own, figure.get(name)] for name, own in zip(names, ranks, strict=True)]
        sections.append(Section(f"Keep rate {percent(rate)}", Table(columns, rows)))
    return sections


def _draw_accuracy(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    paths = compare.draw_accuracy(results, folder / "accuracy.png", lambda name: name not in HARD_MERGING)
    if settings.miniature:
        return paths
    as_measured: list[Result] = []
    for (model, data, rate), row in printed_accuracies().items():
        images = printed.IMAGES.get(data)
        about = {"model": model, "data": data, "keep_rate": rate, "images": images}
        numbers = {DENSE: printed.value("fine-tuned", model, data, DENSE), **row}
        metric = "mAP" if images is None else "top1"
        as_measured += [{**about, "method": name, metric: number} for name, number in numbers.items()]
    file = folder / "as-printed.png"
    return paths + compare.draw_accuracy(as_measured, file, lambda name: name not in HARD_MERGING)


def _bars(table: Accuracies, title: str, rate: float | None = None) -> BarPanel:
    ranks = mean_ranks(table, rate).items()
    bars = [Bar(name, mean, mean - spread, mean + spread) for name, (mean, spread) in ranks]
    return BarPanel([bars], "mean rank (1 is best)", title)


def _draw_difference(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    sources = _sources(results, HARD_MERGING)
    rates, panels = _rates(sources), []
    for source, table in sources.items():
        curves = [Curve(name, rates, [of[rate] for rate in rates]) for name, of in differences(table).items() if of]
        label = "points above the best prior\nhard-merging method"
        panels.append(CurvePanel(curves, "keep rate", label, title=source, x_ticks=rates))
    draw_curves(panels, folder / "difference.png")
    return [folder / "difference.png"]


def _draw_ranks(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    panels = [_bars(table, source) for source, table in _sources(results, HARD_MERGING).items()]
    draw_bars([panels], folder / "ranks.png", note="whiskers: standard deviation over keep rates, models, data sets")
    return [folder / "ranks.png"]


def _draw_per_rate(results: Sequence[Result], scale: Any, settings: Settings, folder: Path) -> list[Path]:
    sources = _sources(results, ALL)
    rates = _rates(sources)
    rows = [[_bars(of, f"{percent(rate)}, {source}", rate) for rate in rates] for source, of in sources.items()]
    draw_bars(rows, folder / "ranking-per-rate.png", note="whiskers: deviation over models and data sets")
    return [folder / "ranking-per-rate.png"]


# Items that have no cells, but what the fine-tuned table found.
_derived = partial(
    Study,
    stands_in="From the record of fine-tuned in miniature.",
    full=(),
    miniature=(),
    axes=lambda scale, settings: (),
    run=lambda scale, settings: dict,
    borrow=lambda settings: read_results(settings.folder(FINE_TUNED.name)),
)
ITEMS = (
    _derived(
        name="accuracy-curves",
        shows="figure iccvResults",
        about="Accuracy against keep rate of the methods that merge hard, fine-tuned; drawn from the record of "
        "fine-tuned and, for the paper's models, from the printed table; other methods are thin grey lines",
        table=lambda results, scale: (),
        draw=_draw_accuracy,
    ),
    _derived(
        name="rank",
        shows="figure rankedICCV",
        about="Mean rank of the methods that merge hard over keep rates, models and data sets; equals share their "
        "ranks",
        table=_rank_table,
        draw=_draw_ranks,
    ),
    _derived(
        name="difference",
        shows="figure deltaICCV",
        about="Points of accuracy by which ATC is above the best prior method that merges hard, per keep rate",
        table=_difference_table,
        draw=_draw_difference,
    ),
    _derived(
        name="ranking-per-rate",
        shows="figure avgRanking",
        about="Mean rank at each keep rate over models and data sets, among the paper's sixteen methods",
        table=_per_rate_table,
        draw=_draw_per_rate,
    ),
)
