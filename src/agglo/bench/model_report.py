"""The model benchmark as a table and as a picture, both from what its JSON file holds."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.drawing.charts import Bar, BarPanel, draw_bars
from agglo.drawing.colours import FREE, SLICED
from agglo.experiments.files import require_folder
from agglo.experiments.machine import load_warning

_COLUMNS = ("keep", "variant", "tokens left", "GFLOPs", "img/s", "min", "max", "x dense", "of free")
_LEFT = ("keep", "variant", "tokens left")


def table(report: dict[str, Any]) -> str:
    """Text for a terminal."""
    cells = [_COLUMNS, *(_cells(result) for result in report["results"])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    lines = [", ".join(headlines(report))]
    for row in cells:
        padded = [
            cell.ljust(width) if title in _LEFT else cell.rjust(width)
            for title, cell, width in zip(_COLUMNS, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.append(f"noise: timed twice in this run, the dense model was up to {report['noise']:.1%} off itself")
    if busy := load_warning(report["machine"]):
        lines.append(busy)
    lines += [f"not run: {skip['name']} at {skip['keep_rate']:g}: {skip['reason']}" for skip in report["skipped"]]
    return "\n".join(lines)


def headlines(report: dict[str, Any]) -> tuple[str, str]:
    """What ran, and where."""
    settings, machine = report["settings"], report["machine"]
    repeats = len(report["results"][0]["images_per_second"])
    what = f"{settings['model']}, batch {settings['batch_size']}, {settings['dtype']}, median of {repeats} repeats"
    return what, machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        "" if result["keep_rate"] is None else f"{result['keep_rate']:g}",
        result["name"],
        " ".join(str(count) for count, _ in groupby(result["counts"])),
        f"{result['gflops']:.2f}",
        f"{result['median']:.1f}",
        f"{result['min']:.1f}",
        f"{result['max']:.1f}",
        f"{result['to_dense']:.2f}",
        "" if result["to_free"] is None else f"{result['to_free']:.2f}",
    )


def require_plot_name(path: Path) -> Path:
    """The path itself, if a plot can be written there; told before any work is done."""
    from matplotlib.backend_bases import FigureCanvasBase

    accepted = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in accepted:
        raise ValueError(f"plot={str(path)!r} has no known ending; accepted: {', '.join(accepted)}")
    return require_folder(path)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of images a second, one group for each keep rate, least to most as whiskers, times dense beside them."""
    results = [result for result in report["results"] if result["name"] != "dense again"]
    groups = [[_bar(result) for result in group] for _, group in groupby(results, key=lambda r: r["keep_rate"])]
    what, where = headlines(report)
    panel = BarPanel(groups, "images a second (times dense)")
    draw_bars([[panel]], path, title=f"{what}\n{where}", note="whiskers: slowest and fastest repeat")


def _bar(result: dict[str, Any]) -> Bar:
    rate = result["keep_rate"]
    # Nothing is sliced away: what is left is the dense model in agglo's loop, a few images at a time.
    name = SLICED if (result["name"], rate) == (FREE, 1) else result["name"]
    label = name if rate is None or name == SLICED else f"{name}, keep {rate:g}"
    note = f"{result['median']:.0f}  ({result['to_dense']:.2f}x)"
    return Bar(name, result["median"], result["min"], result["max"], note, label)
