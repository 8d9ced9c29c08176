"""The model benchmark as a table and as a picture, both from what its JSON file holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.experiments.files import require_output
from agglo.experiments.machine import load_warning
from agglo.experiments.tables import Column, Table
from agglo.experiments.variants import describe_budget

_COLUMNS = (
    Column("budget", left=True),
    Column("variant", left=True),
    Column("tokens left", left=True),
    Column("GFLOPs", ".2f"),
    Column("img/s", ".1f"),
    Column("min", ".1f"),
    Column("max", ".1f"),
    Column("x dense", ".2f"),
    Column("of free", ".2f"),
)
_COLOURS = {"dense": "#9a9a9a", "free": "#d9d9d9", "tome": "#e0912f"}
_FURTHER_COLOURS = ("#2f6fb0", "#5f9ed1", "#1f4e79", "#3aa6a0", "#7a5ba6")


def table(report: dict[str, Any]) -> str:
    """Text for a terminal."""
    lines = [", ".join(headlines(report)), Table(_COLUMNS, list(map(_cells, report["results"]))).text()]
    lines.append(f"noise: timed twice in this run, the dense model was up to {report['noise']:.1%} off itself")
    if busy := load_warning(report["machine"]):
        lines.append(busy)
    lines += [f"not run: {skip['name']} at {describe_budget(skip)}: {skip['reason']}" for skip in report["skipped"]]
    return "\n".join(lines)


def headlines(report: dict[str, Any]) -> tuple[str, str]:
    """What ran, and where."""
    settings, machine = report["settings"], report["machine"]
    repeats = len(report["results"][0]["images_per_second"])
    what = f"{settings['model']}, batch {settings['batch_size']}, {settings['dtype']}, median of {repeats} repeats"
    return what, machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"


def _cells(result: dict[str, Any]) -> list[Any]:
    tokens = " ".join(str(count) for count, _ in groupby(result["counts"]))
    numbers = (result[name] for name in ("gflops", "median", "min", "max", "to_dense", "to_free"))
    return [describe_budget(result), result["name"], tokens, *numbers]


def require_plot_name(path: Path) -> Path:
    """The path itself, if a plot can be written there; told before any work is done."""
    from matplotlib.backend_bases import FigureCanvasBase

    accepted = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in accepted:
        raise ValueError(f"plot={str(path)!r} has no known ending; accepted: {', '.join(accepted)}")
    return require_output(path)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of images per second, one group per budget, least to most as whiskers, times dense beside them."""
    from matplotlib.figure import Figure

    results = [result for result in report["results"] if result["name"] != "dense again"]
    budgets = list(dict.fromkeys(map(describe_budget, results)))
    names = list(dict.fromkeys(result["name"] for result in results))
    colours = _colours(names)
    positions = [number + 0.7 * budgets.index(describe_budget(result)) for number, result in enumerate(results)]

    figure = Figure(figsize=(8, 1.5 + 0.38 * positions[-1]), layout="constrained")
    axes = figure.add_subplot()
    medians = [result["median"] for result in results]
    whiskers = [[r["median"] - r["min"] for r in results], [r["max"] - r["median"] for r in results]]
    axes.barh(positions, medians, height=0.8, color=[colours[result["name"]] for result in results])
    axes.errorbar(medians, positions, xerr=whiskers, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    for position, result in zip(positions, results, strict=True):
        axes.annotate(
            f"{result['median']:.0f}  ({result['to_dense']:.2f}x)",
            (result["max"], position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(positions, [_bar_name(result) for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, max(result["max"] for result in results) * 1.18)
    axes.set_xlabel("images per second (times dense)")
    axes.set_title("\n".join(headlines(report)), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _bar_name(result: dict[str, Any]) -> str:
    return ", ".join(filter(None, (result["name"], describe_budget(result))))


def _colours(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name not in _COLOURS]
    return {**_COLOURS, **{name: _FURTHER_COLOURS[i % len(_FURTHER_COLOURS)] for i, name in enumerate(others)}}
