"""The study in miniature as the paper shows its own: tables, mean ranks, differences to the best prior method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from agglo.classification.evaluation.report import sampling_error
from agglo.drawing.charts import (
    Bar,
    BarPanel,
    ColumnPanel,
    Curve,
    CurvePanel,
    Level,
    draw_bars,
    draw_columns,
    draw_curves,
)
from agglo.experiments.tables import CANNOT, Column, Table

# Of other authors, as the paper counts them: plain pooling is a yardstick.
HARD = ("kmedoids", "dpc_knn", "dpc_knn equal", "tome")
SOFT = ("sit", "patch_merger", "sinkhorn")
ATC = ("atc single", "atc average", "atc complete")
_KEEP_RATE = "keep rate at each stage"

Cells = dict[str, dict[float, float]]


def cells(report: dict[str, Any]) -> tuple[float, Cells]:
    """Top-1 of the dense model, and of every name at every rate it reached."""
    found: Cells = {}
    dense = float("nan")
    for result in report["results"]:
        if result["name"] == "dense":
            dense = result["top1"]
        elif "top1" in result:
            found.setdefault(result["name"], {})[result["keep_rate"]] = result["top1"]
    return dense, found


def merging_hard(found: Cells) -> Cells:
    """Those that the paper's ranking compares."""
    return {name: values for name, values in found.items() if name in (*HARD, *ATC)}


_RANKED = {"merging hard": merging_hard, "all": dict}


def ranks(found: Cells, rates: Sequence[float]) -> Cells:
    """Rank of every name among those that reached a rate, 1 the best; equals share the mean of their ranks."""
    ranked: Cells = {name: {} for name in found}
    for rate in rates:
        names = [name for name in found if rate in found[name]]
        for name, rank in zip(names, rankdata([-found[name][rate] for name in names]), strict=True):
            ranked[name][rate] = float(rank)
    return ranked


def differences(found: Cells, rates: Sequence[float], prior: Sequence[str]) -> Cells:
    """How far each linkage of ATC is above the best of the prior methods at a rate, in points."""
    best = {rate: max(found[name][rate] for name in prior if rate in found.get(name, {})) for rate in rates}
    return {name: {rate: found[name][rate] - best[rate] for rate in rates} for name in ATC}


def _processors(*reports: dict[str, Any]) -> str:
    """All that the results ran on: accuracies do not depend on it, but a reader may want to know."""
    found = {result.get("processor") or report["machine"]["cpu"] for report in reports for result in report["results"]}
    return " and ".join(sorted(found))


def _head(tuned: dict[str, Any]) -> str:
    images, machine = tuned["images"], tuned["machine"]
    return (
        f"# The study in miniature\n\n`make mini-study`: {images['t10k']} test images; fine-tuned on {images['train']} "
        f"training images. {_processors(tuned)}, {machine['date'][:10]}."
    )


def _markdown(title: str, rows: Cells, rates: Sequence[float], digits: int = 2, sign: str = "") -> str:
    form = f"{sign}.{digits}f"
    columns = [Column(title, left=True), *(Column(f"{rate:.0%}", form) for rate in rates), Column("mean", form)]
    lines = []
    for name, values in rows.items():
        mean = float(np.mean(list(values.values()))) if values else None
        lines.append([name, *(values.get(rate, CANNOT) for rate in rates), mean])
    return Table(columns, lines).markdown()


def write(shelf: dict[str, Any], tuned: dict[str, Any], folder: Path) -> str:
    """tables.md and the pictures in a folder; the text of the tables."""
    parts = [_head(tuned)]
    rates = sorted({result["keep_rate"] for result in shelf["results"]} - {None})
    both = {"off the shelf": cells(shelf), "fine-tuned": cells(tuned)}
    for title, (dense, found) in both.items():
        parts += [
            f"## {title.capitalize()}: top-1, dense {dense:.2f}",
            _markdown("keep rate", found, rates),
            f"### {title.capitalize()}: rank among all methods",
            _markdown("keep rate", ranks(found, rates), rates, digits=1),
            f"### {title.capitalize()}: rank among methods that merge hard",
            _markdown("keep rate", ranks(merging_hard(found), rates), rates, digits=1),
            f"### {title.capitalize()}: points above the best prior method that merges hard",
            _markdown("keep rate", differences(found, rates, HARD), rates, sign="+"),
        ]
        if any(name in found for name in SOFT):
            parts += [
                f"### {title.capitalize()}: points above the best prior method that merges hard or soft",
                _markdown("keep rate", differences(found, rates, (*HARD, *SOFT)), rates, sign="+"),
            ]
    text = "\n\n".join(parts) + "\n"
    (folder / "tables.md").write_text(text, encoding="utf-8")
    _plot_accuracy(both, rates, tuned["images"], folder / "accuracy.png")
    _plot_ranks(both, rates, folder / "ranks.png")
    _plot_differences(both, rates, tuned["images"], folder / "difference.png")
    return text


def page(shelf: dict[str, Any], tuned: dict[str, Any]) -> str:
    """What docs/mini-study.md shows of it."""
    rates = sorted({result["keep_rate"] for result in shelf["results"]} - {None})
    parts = [f"({_processors(shelf, tuned)}, {tuned['machine']['date'][:10]})"]
    for title, report in (("Off the shelf", shelf), ("Fine-tuned", tuned)):
        dense, found = cells(report)
        parts += [f"{title}, top-1 (%); dense {dense:.2f}", _markdown("keep rate", found, rates)]
    parts.append("Fine-tuned, points above the best prior method that merges hard (K-Medoids, DPC-KNN, ToMe)")
    parts.append(_markdown("keep rate", differences(found, rates, HARD), rates, sign="+"))
    return "\n\n".join(parts)


def _plot_accuracy(
    both: dict[str, tuple[float, Cells]], rates: Sequence[float], images: dict[str, int], path: Path
) -> None:
    """Hard-merging methods against keep rate, as in the paper's figure; the others as thin grey lines, which may leave
    the frame."""
    panels = []
    for title, (dense, found) in both.items():
        curves = []
        for name, values in found.items():
            at = [rate for rate in rates if rate in values]
            heights = [values[rate] for rate in at]
            errors = [sampling_error(height, images["t10k"]) for height in heights]
            curves.append(Curve(name, at, heights, errors, faint=name not in (*HARD, *ATC)))
        lowest = min(min(values.values()) for values in merging_hard(found).values())
        highest = max(dense, *(max(values.values()) for values in found.values()))
        margin = 0.06 * (highest - lowest)
        limits = (lowest - margin, highest + margin)
        level = Level(dense, sampling_error(dense, images["t10k"]))
        panels.append(CurvePanel(curves, _KEEP_RATE, "top-1 (%)", level, title, x_ticks=rates, y_limits=limits))
    note = f"bars and grey band: standard error of {images['t10k']} test images"
    draw_curves(panels, path, note=note)


def _plot_ranks(both: dict[str, tuple[float, Cells]], rates: Sequence[float], path: Path) -> None:
    """Mean and deviation over keep rates: above among methods that merge hard, as in the paper's figure, below all."""
    panels = []
    for who, of in _RANKED.items():
        row = []
        for title, (_, found) in both.items():
            ranked = {name: list(values.values()) for name, values in ranks(of(found), rates).items() if values}
            bars = []
            for name in sorted(ranked, key=lambda name: np.mean(ranked[name])):
                mean, spread = float(np.mean(ranked[name])), float(np.std(ranked[name]))
                bars.append(Bar(name, mean, mean - spread, mean + spread))
            row.append(BarPanel([bars], "mean rank over keep rates (1 is best)", f"{title}, {who}"))
        panels.append(row)
    draw_bars(panels, path, note="whiskers: standard deviation over keep rates")


def _plot_differences(
    both: dict[str, tuple[float, Cells]], rates: Sequence[float], images: dict[str, int], path: Path
) -> None:
    places = [f"{rate:.0%}" for rate in rates]
    panels = []
    for title, (_, found) in both.items():
        series = {name: list(values.values()) for name, values in differences(found, rates, HARD).items()}
        y_label = "points above the best prior\nhard-merging method"
        panels.append(ColumnPanel(places, series, "keep rate", y_label, title))
    error = max(sampling_error(dense, images["t10k"]) for dense, _ in both.values())
    # Both accuracies of a difference are of the same images, so that its own error is smaller than two errors make.
    note = f"standard error of one accuracy on {images['t10k']} test images: about {error:.1f} points"
    draw_columns(panels, path, note=note)
