"""An evaluation as tables and as a picture: of what `grid.run` gives, or of what its JSON file holds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.experiments.machine import load_warning
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.experiments.variants import describe_budget

METRICS = {"top1": "top-1", "top5": "top-5", "mAP": "mAP"}
# What a result calls its budget, the column's title, and the axis's.
_BUDGETS = {
    "keep_rate": ("keep", "keep rate at each stage"),
    "threshold": ("threshold", "threshold"),
    "tokens_left": ("schedule", "patch tokens left after a block, on average"),
}


def text(report: dict[str, Any]) -> str:
    """For a terminal: what ran, a row for each cell, and for a real grid the paper's kind of table."""
    report = _with_tokens_left(report)
    parts = ["\n".join(headlines(report)), _rows(report)]
    reduced = [result for result in report["results"] if result["name"] != "dense"]
    if len({_budget(result) for result in reduced}) > 1 and len({result["name"] for result in reduced}) > 1:
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
    """What the cells differ in: the one of _BUDGETS that they have."""
    return next(
        (kind for kind in _BUDGETS for result in report["results"] if result.get(kind) is not None), "keep_rate"
    )


def _with_tokens_left(report: dict[str, Any]) -> dict[str, Any]:
    """The report with a number for each schedule, by which its results can be ordered; 0 where it cannot run."""
    results = [
        result | {"tokens_left": fmean(result.get("counts") or [0])} if result.get("schedule") else result
        for result in report["results"]
    ]
    return {**report, "results": results}


def _budget(result: dict[str, Any]) -> str:
    """The budget of a cell, below a title that says what the number is."""
    return describe_budget(result).rpartition(" ")[2]


def _reductions(report: dict[str, Any]) -> list[str]:
    """The methods with the options that are not their defaults, which the names in the table leave out."""
    reduced = [result for result in report["results"] if result["method"] is not None]
    if not reduced:
        return []
    parts = list(dict.fromkeys(result["method"] for result in reduced))
    if reduced[0]["blocks"] is not None:
        parts.append(f"at blocks {' '.join(map(str, reduced[0]['blocks']))}")
    if reduced[0]["proportional"] is not None:
        parts.append(f"proportional attention {'on' if reduced[0]['proportional'] else 'off'}")
    return [", ".join(parts)]


def _where(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    several = f", {settings['processes']} processes" if settings["processes"] > 1 else ""
    return (machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads") + several


def _rows(report: dict[str, Any]) -> str:
    results = report["results"]
    metrics = [name for name in METRICS if any(name in result for result in results)]
    # By processor: a speed is compared with that of the dense model on the same one.
    dense = {r.get("processor"): r["images_per_second"] for r in results if r["name"] == "dense"}
    budget_title, _ = _BUDGETS[_kind(report)]
    columns = [Column(title, left=True) for title in (budget_title, "variant", "tokens left")]
    columns += [Column("GFLOPs", ".2f"), *(Column(METRICS[name], ".2f") for name in metrics), Column("img/s", ".1f")]
    if dense:
        columns.append(Column("x dense", ".2f"))
    rows: list[list[Any]] = []
    for result in results:
        if "cannot" in result:
            found: list[Any] = [CANNOT]
        else:
            speed = result["images_per_second"]
            found = [_tokens(result), result["gflops"], *(result[name] for name in metrics), speed]
            if dense:
                own = dense.get(result.get("processor"))
                found.append(None if own is None else speed / own)
        row = [_budget(result), result["name"], *found]
        rows.append(row + [None] * (len(columns) - len(row)))
    return Table(columns, rows).text()


def _tokens(result: dict[str, Any]) -> str:
    if result["counts"] is None:
        return "differ"
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies']} {counts}"


def _pivot(report: dict[str, Any]) -> str:
    """Methods by their budgets, from many tokens to few, as in the paper's off-the-shelf table."""
    kind, metric = _kind(report), main_metric(report)
    # A high keep rate leaves many tokens, a high threshold few.
    order = sorted(
        (result for result in report["results"] if result.get(kind) is not None),
        key=lambda result: (_schedule_kind(result), result[kind] if kind == "threshold" else -result[kind]),
    )
    budgets = list(dict.fromkeys(map(_budget, order)))
    rows: list[list[Any]] = []
    for name in dict.fromkeys(result["name"] for result in report["results"]):
        found = {_budget(result): result.get(metric, CANNOT) for result in report["results"] if result["name"] == name}
        if name == "dense":
            rows.append([name, found[""], *[None] * (len(budgets) - 1)])
        else:
            rows.append([name, *map(found.get, budgets)])
    return Table([Column(METRICS[metric], left=True), *(Column(title, ".2f") for title in budgets)], rows).text()


def _notes(report: dict[str, Any]) -> list[str]:
    data = report["data"]
    notes = []
    top1 = [result["top1"] for result in report["results"] if "top1" in result]
    if top1:
        error = max(sampling_error(value, data["images"]) for value in top1)
        notes.append(f"sampling error of top-1 on {data['images']} images: up to {error:.2f} points")
    if busy := load_warning(report["machine"]):
        notes.append(busy)
    ran_on = sorted({result["processor"] for result in report["results"] if result.get("processor")})
    if len(ran_on) > 1:
        notes.append(f"speeds are of several processors ({', '.join(ran_on)}); x dense compares those of one")
    notes += data["remarks"]
    if data["skipped"]:
        notes.append(f"skipped {len(data['skipped'])}: {'; '.join(data['skipped'][:3])}")
    for result in report["results"]:
        if "cannot" in result:
            notes.append(f"cannot: {result['name']} at {_budget(result)}: {result['cannot']}")
    return notes


def sampling_error(percent: float, images: int) -> float:
    """How far an accuracy may be off, in points, because only so many images were seen: half the width of Wilson's
    interval at one standard deviation. With p = percent / 100 and n images that is

        100 * sqrt(p (1 - p) / n + 1 / (4 n^2)) / (1 + 1 / n)

    For many images it is the usual standard error, sqrt(p (1 - p) / n). For few images it stays honest: 0 of 4 right is
    an error of 10 points, where the usual formula says 0.
    """
    p = percent / 100
    return 100 * math.sqrt(p * (1 - p) / images + 1 / (4 * images**2)) / (1 + 1 / images)


def main_metric(report: dict[str, Any]) -> str:
    """The first of METRICS that the results have."""
    return next(name for name in METRICS if any(name in result for result in report["results"]))


def _schedule_kind(result: dict[str, Any]) -> str:
    """Schedules of one kind are points of one line."""
    return (result.get("schedule") or "").partition(":")[0]


def _line(result: dict[str, Any]) -> tuple[str, ...]:
    """What tells the lines of a plot apart: the name, the schedule, the method's options, proportional attention."""
    proportional = result["proportional"]
    attention = "" if proportional is None else f"proportional attention {'on' if proportional else 'off'}"
    options = (result["method"] or "").partition(":")[2]
    return result["name"], _schedule_kind(result), *options.split(","), attention


def _labels(lines: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Lines by their names; where a file holds a method twice, with what the two do not share."""
    found = {}
    for line in lines:
        alike = [other for other in lines if other[0] == line[0]]
        own = [part for part in line[1:] if part and not all(part in other for other in alike)]
        found[line] = ", ".join([line[0], *own])
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """Accuracy against the budget and against speed: a line for each variant, the dense model as a grey
    level; top-1 and top-5 with their sampling error, speeds with their range where it was measured."""
    report = _with_tokens_left(report)
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
        CurvePanel(by_rate, _BUDGETS[kind][1], y_label, level, x_ticks=ticks),
        CurvePanel(by_speed, "images per second (model alone)", y_label, speed_level, from_zero=True),
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
