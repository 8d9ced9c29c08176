"""An evaluation as tables and as a picture: of what `evaluation_grid.run` gives, or of what its JSON file holds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.experiments.machine import load_warning
from agglo.experiments.variants import in_words

METRICS = {"top1": "top-1", "top5": "top-5", "mAP": "mAP"}
# How far a cell reduces: what a result calls it, the column's title, and the axis's.
_HOW_FAR = {
    "keep_rate": ("keep", "keep rate at each stage"),
    "threshold": ("threshold", "threshold"),
    "removed": ("removed", "patch tokens removed a block"),
}
_LEFT = ("variant", "tokens left", *(title for title, _ in _HOW_FAR.values()))


def text(report: dict[str, Any]) -> str:
    """For a terminal: what ran, a row for each cell, and for a real grid the paper's kind of table."""
    parts = ["\n".join(headlines(report)), _rows(report)]
    reduced = [result for result in report["results"] if result["name"] != "dense"]
    if len({_far(result) for result in reduced}) > 1 and len({result["name"] for result in reduced}) > 1:
        parts.append(_pivot(report))
    if notes := _notes(report):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def headlines(report: dict[str, Any]) -> list[str]:
    """What ran, on what, and where."""
    model, data, settings = (report[part] for part in ("model", "data", "settings"))
    lines = [
        f"{model['name']} ({model['weights']}) on {data['name']} ({data['chosen']}): {data['images']} images of "
        f"{data['classes']} classes, {report['inputs']['in_words']}",
        f"{_where(report)}, batch {settings['batch_size']}, {settings['dtype']}; img/s is the model alone, without "
        "reading images",
    ]
    return lines + _reductions(report)


def _kind(report: dict[str, Any]) -> str:
    """What the cells differ in: the one of _HOW_FAR that they have."""
    return next(
        (kind for kind in _HOW_FAR for result in report["results"] if result.get(kind) is not None), "keep_rate"
    )


def _far(result: dict[str, Any]) -> str:
    """How far a cell reduces, below a title that says what the number is."""
    if result["name"] == "dense":
        return ""
    words = in_words(result)
    return words if result.get("schedule") is not None else words.split()[-1]


def _reductions(report: dict[str, Any]) -> list[str]:
    """The methods with all their options, which the names in the table leave out."""
    reduced = [result for result in report["results"] if result["method"] is not None]
    if not reduced:
        return []
    told = list(dict.fromkeys(result["method"] for result in reduced))
    if reduced[0]["blocks"] is not None:
        told.append(f"at blocks {' '.join(map(str, reduced[0]['blocks']))}")
    if reduced[0]["proportional"] is not None:
        told.append(f"proportional attention {'on' if reduced[0]['proportional'] else 'off'}")
    return [", ".join(told)]


def _where(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    several = f", {settings['processes']} processes" if settings["processes"] > 1 else ""
    return (machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads") + several


def _rows(report: dict[str, Any]) -> str:
    results = report["results"]
    metrics = [name for name in METRICS if any(name in result for result in results)]
    dense = next((result["images_per_second"] for result in results if result["name"] == "dense"), None)
    far, _ = _HOW_FAR[_kind(report)]
    titles = [far, "variant", "tokens left", "GFLOPs", *(METRICS[name] for name in metrics), "img/s"]
    table = [[*titles, "x dense"] if dense else titles]
    for result in results:
        row = [_far(result), result["name"]]
        if "cannot" in result:
            row += ["cannot", *[""] * (len(metrics) + 2)]
        else:
            speed = result["images_per_second"]
            row += [_tokens(result), "" if result["gflops"] is None else f"{result['gflops']:.2f}"]
            row += [f"{result[name]:.2f}" for name in metrics] + [f"{speed:.1f}"]
        table.append([*row, "" if "cannot" in result else f"{speed / dense:.2f}"] if dense else row)
    return _aligned(table, _LEFT)


def _tokens(result: dict[str, Any]) -> str:
    if result["counts"] is None:
        return "differ"
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies']} {counts}"


def _pivot(report: dict[str, Any]) -> str:
    """Methods by how far they reduce, from little to much, as in the paper's off-the-shelf table."""
    kind, metric = _kind(report), main_metric(report)
    # A high keep rate is little, a high threshold or number of removed tokens much.
    order = sorted(
        (result for result in report["results"] if result.get(kind) is not None),
        key=lambda result: (result.get("schedule") or "", -result[kind] if kind == "keep_rate" else result[kind]),
    )
    columns = list(dict.fromkeys(map(_far, order)))
    table = [[METRICS[metric], *columns]]
    for name in dict.fromkeys(result["name"] for result in report["results"]):
        found = {_far(result): result for result in report["results"] if result["name"] == name}
        if name == "dense":
            table.append([name, f"{found[''][metric]:.2f}", *[""] * (len(columns) - 1)])
        else:
            table.append([name, *(_value(found.get(far), metric) for far in columns)])
    return _aligned(table, (table[0][0],))


def _value(result: dict[str, Any] | None, metric: str) -> str:
    return "" if result is None else f"{result[metric]:.2f}" if metric in result else "cannot"


def _aligned(table: list[list[str]], left: tuple[str, ...]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = zip(table[0], row, widths, strict=True)
        lines.append("  ".join(cell.ljust(w) if title in left else cell.rjust(w) for title, cell, w in cells).rstrip())
    return "\n".join(lines)


def _notes(report: dict[str, Any]) -> list[str]:
    data = report["data"]
    notes = []
    top1 = [result["top1"] for result in report["results"] if "top1" in result]
    if top1:
        error = max(sampling_error(value, data["images"]) for value in top1)
        notes.append(f"sampling error of top-1 on {data['images']} images: up to {error:.2f} points")
    if busy := load_warning(report["machine"]):
        notes.append(busy)
    notes += data["remarks"]
    if data["skipped"]:
        notes.append(f"skipped {len(data['skipped'])}: {'; '.join(data['skipped'][:3])}")
    for result in report["results"]:
        if "cannot" in result:
            notes.append(f"cannot: {result['name']} at {_far(result)}: {result['cannot']}")
    return notes


def sampling_error(percent: float, images: int) -> float:
    """Standard error, in points, of an accuracy that so many images gave."""
    return 100 * math.sqrt(percent / 100 * (1 - percent / 100) / images)


def main_metric(report: dict[str, Any]) -> str:
    """The first of METRICS that the results have."""
    return next(name for name in METRICS if any(name in result for result in report["results"]))


def _line(result: dict[str, Any]) -> tuple[str, ...]:
    """What tells the lines of a plot apart: the name, the schedule, the method's options, proportional attention."""
    schedule = result.get("schedule") or ""
    proportional = result["proportional"]
    attention = "" if proportional is None else f"proportional attention {'on' if proportional else 'off'}"
    options = result["method"].partition("(")[2].removesuffix(")") if result["method"] else ""
    return result["name"], schedule, *options.split(", "), attention


def _labels(lines: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Lines by their names; where a file holds a method twice, with what the two do not share."""
    found = {}
    for line in lines:
        alike = [other for other in lines if other[0] == line[0]]
        own = [part for part in line[1:] if part and not all(part in other for other in alike)]
        found[line] = ", ".join([line[0], *own])
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """Accuracy against how far tokens are reduced and against speed: a line for each variant, the dense model as a grey
    level; top-1 and top-5 with their sampling error, speeds with their range where it was measured."""
    kind, metric = _kind(report), main_metric(report)
    done = [result for result in report["results"] if "cannot" not in result]
    lines = list(dict.fromkeys(_line(result) for result in done if result["name"] != "dense"))
    by_rate, by_speed = [], []
    for line, label in _labels(lines).items():
        of_line = sorted((result for result in done if _line(result) == line), key=lambda result: result[kind])
        values, errors = [result[metric] for result in of_line], _errors(of_line, metric)
        by_rate.append(Curve(label, [result[kind] for result in of_line], values, errors))
        speeds = [result["images_per_second"] for result in of_line]
        by_speed.append(Curve(label, speeds, values, errors, _speed_ranges(of_line)))
    level = speed_level = None
    for result in (result for result in done if result["name"] == "dense"):
        errors, ranges = _errors([result], metric), _speed_ranges([result])
        level = Level(result[metric], errors[0] if errors else None)
        speed_level = replace(level, x=result["images_per_second"], x_range=ranges[0] if ranges else None)
    ticks = sorted({result.get(kind) for result in done} - {None})
    y_label = f"{METRICS[metric]} (%)"
    panels = [
        CurvePanel(by_rate, _HOW_FAR[kind][1], y_label, level, x_ticks=ticks),
        CurvePanel(by_speed, "images a second (model alone)", y_label, speed_level, from_zero=True),
    ]
    data, settings = report["data"], report["settings"]
    where = report["machine"]["gpu"] or f"{report['machine']['cpu']}, {settings['threads']} threads"
    title = (
        f"{report['model']['name']}, {data['name']}, {data['images']} images\n{where}, batch {settings['batch_size']}"
    )
    notes = [f"bars and grey band: standard error of {data['images']} images"] if _errors(done, metric) else []
    notes += ["horizontal bars: half of the turns"] if _speed_ranges(done) else []
    draw_curves(panels, path, title=title, note="; ".join(notes), share_y=True)


def _errors(results: list[dict[str, Any]], metric: str) -> list[float] | None:
    """Standard errors; None for a metric that is no share of images."""
    if metric not in ("top1", "top5"):
        return None
    return [sampling_error(result[metric], result["images"]) for result in results]


def _speed_ranges(results: list[dict[str, Any]]) -> list[tuple[float, float]] | None:
    """Half of the turns of each were between these speeds; None where speeds were not taken in turns."""
    if not results or any(result.get("spread") is None for result in results):
        return None
    speeds = ((result["images_per_second"], result["spread"] / 2) for result in results)
    return [(speed - half, speed + half) for speed, half in speeds]
