"""The study in miniature as the paper shows its own: tables, mean ranks, differences to the best prior method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import rankdata

from agglo.experiments.tables import CANNOT, Column, Table

# Of other authors, as the paper counts them: plain pooling is a yardstick.
HARD = ("kmedoids", "dpc_knn", "dpc_knn equal", "tome")
SOFT = ("sit", "patch_merger", "sinkhorn")
ATC = ("atc single", "atc average", "atc complete")
COLOURS = {"atc single": "#c8553d", "atc average": "#3a9679", "atc complete": "#7a5ba6"}
PRIOR_COLOURS = {"kmedoids": "#d99a2b", "dpc_knn": "#8c5a3c", "dpc_knn equal": "#c99f7f", "tome": "#2f6fb0"}

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


def _head(tuned: dict[str, Any]) -> str:
    images, machine = tuned["images"], tuned["machine"]
    return (
        f"# The study in miniature\n\n`make mini-study`: {images['t10k']} test images; fine-tuned on {images['train']} "
        f"training images. {machine['cpu']}, {machine['date'][:10]}."
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
    _plot_accuracy(both, rates, folder / "accuracy.png")
    _plot_ranks(both, rates, folder / "ranks.png")
    _plot_differences(both, rates, folder / "difference.png")
    return text


def _panels(count: int, size: tuple[float, float], heights: Sequence[float] = (1,)) -> tuple[Figure, Any]:
    """A figure of so many panels a row, and its axes: an array, of two dimensions if there are several rows."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(heights), count, height_ratios=heights)
    for panel in axes.flat:
        panel.grid(color="#e6e6e6")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_accuracy(both: dict[str, tuple[float, Cells]], rates: Sequence[float], path: Path) -> None:
    """Hard-merging methods against keep rate, as in the paper's figure; the others as thin grey lines, which may leave
    the frame."""
    figure, axes = _panels(2, (10, 4.4))
    markers = dict(zip((*HARD, *ATC), "vsP*oD^", strict=True))
    for panel, (title, (dense, found)) in zip(axes, both.items(), strict=True):
        for name, values in found.items():
            at = [rate for rate in rates if rate in values]
            if name in markers:
                colour = {**COLOURS, **PRIOR_COLOURS}[name]
                panel.plot(at, [values[rate] for rate in at], label=name, color=colour, marker=markers[name], zorder=3)
            else:
                panel.plot(at, [values[rate] for rate in at], color="#c4c4c4", linewidth=0.9)
        panel.plot([], [], color="#c4c4c4", linewidth=0.9, label="other methods")
        lowest = min(min(values.values()) for values in merging_hard(found).values())
        highest = max(dense, *(max(values.values()) for values in found.values()))
        margin = 0.06 * (highest - lowest)
        panel.set_ylim(lowest - margin, highest + margin)
        panel.axhline(dense, color="#555555", linestyle="--", linewidth=1, label="dense")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("keep rate at each stage")
        panel.set_xticks(rates)
        panel.set_ylabel("top-1 (%)")
    # The last panel has every name: more methods take part when they are fine-tuned.
    figure.legend(*axes[-1].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150)


def _plot_ranks(both: dict[str, tuple[float, Cells]], rates: Sequence[float], path: Path) -> None:
    """Mean and deviation over keep rates: above among methods that merge hard, as in the paper's figure, below all."""
    figure, axes = _panels(2, (10, 7.5), heights=(1, 2.4))
    compared = {f"{title}, {who}": of(found) for who, of in _RANKED.items() for title, (_, found) in both.items()}
    for panel, (title, found) in zip(axes.flat, compared.items(), strict=True):
        ranked = ranks(found, rates)
        means = {name: float(np.mean(list(values.values()))) for name, values in ranked.items() if values}
        order = sorted(means, key=lambda name: -means[name])
        spread = [float(np.std(list(ranked[name].values()))) for name in order]
        panel.barh(order, [means[name] for name in order], color=[COLOURS.get(name, "#9db7d1") for name in order])
        panel.errorbar([means[name] for name in order], order, xerr=spread, fmt="none", ecolor="#555555", capsize=2)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("mean rank over keep rates (1 is best)")
        panel.set_xlim(left=0)
    figure.savefig(path, dpi=150)


def _plot_differences(both: dict[str, tuple[float, Cells]], rates: Sequence[float], path: Path) -> None:
    figure, axes = _panels(2, (10, 3.6))
    for panel, (title, (_, found)) in zip(axes, both.items(), strict=True):
        for number, (name, values) in enumerate(differences(found, rates, HARD).items()):
            places = np.arange(len(rates)) + (number - 1) * 0.27
            bars = panel.bar(places, [values[rate] for rate in rates], 0.25, label=name, color=COLOURS[name])
            panel.bar_label(bars, fmt="%+.2g", fontsize=6, padding=2)
        panel.axhline(0, color="#555555", linewidth=1)
        panel.set_xticks(range(len(rates)), [f"{rate:.0%}" for rate in rates])
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("keep rate")
        panel.set_ylabel("points above the best prior\nhard-merging method")
        panel.margins(y=0.12)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
