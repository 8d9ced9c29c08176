"""The model benchmark as a table and as a picture, both from what its JSON file holds."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.drawing.charts import Bar, BarPanel, draw_bars
from agglo.drawing.colours import FREE, SLICED
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
    """The path itself, if a plot can be written there; checked before any work is done."""
    from matplotlib.backend_bases import FigureCanvasBase

    accepted = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in accepted:
        raise ValueError(f"plot={str(path)!r} has no known ending; accepted: {', '.join(accepted)}")
    return require_output(path)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of images per second, one group per budget, least to most as whiskers, times dense beside them."""
    results = [result for result in report["results"] if result["name"] != "dense again"]
    groups = [[_bar(result) for result in group] for _, group in groupby(results, key=describe_budget)]
    what, where = headlines(report)
    panel = BarPanel(groups, "images per second (times dense)")
    draw_bars([[panel]], path, title=f"{what}\n{where}", note="whiskers: slowest and fastest repeat")


def _bar(result: dict[str, Any]) -> Bar:
    # Nothing is sliced away: what is left is the dense model in agglo's loop, a few images at a time.
    name = SLICED if (result["name"], result["keep_rate"]) == (FREE, 1) else result["name"]
    label = name if name == SLICED else ", ".join(filter(None, (name, describe_budget(result))))
    note = f"{result['median']:.0f}  ({result['to_dense']:.2f}x)"
    return Bar(name, result["median"], result["min"], result["max"], note, label)
