"""Tables and plots of an evaluation, from what a task's `grid.run` returns or from its JSON file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from agglo.config import BUDGETS, ReductionConfig
from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.lab.evaluation.configs import budget_of
from agglo.text import format_value
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table

Report = dict[str, Any]
Result = dict[str, Any]
# What a result calls its budget, the column's title, and the axis's.
_BUDGETS = {
    "keep_rate": ("keep", "keep rate at each stage"),
    "threshold": ("threshold", "threshold"),
    "tokens_left": ("schedule", "patch tokens left after a block, on average"),
}


@dataclass(frozen=True)
class Quality:
    """The metrics of a task.

    Args:
        metrics: Names of metrics in results, and the titles of their columns.
        main: Given a report, returns the metrics that get a table of methods by budgets, and a plot.
        fractions: The metrics that are fractions of the images, whose sampling error is therefore known.
    """

    metrics: dict[str, str]
    main: Callable[[Report], Sequence[str]]
    fractions: Sequence[str] = ()


def sampling_error(percent: float, images: int) -> float:
    """Return the sampling error of an accuracy in points: half the width of Wilson's interval at one deviation.

    With p = percent / 100 and n images that is

        100 * sqrt(p (1 - p) / n + 1 / (4 n^2)) / (1 + 1 / n)

    For many images it is the usual standard error, sqrt(p (1 - p) / n). For few images it stays honest: 0 of 4 right is
    an error of 10 points, where the usual formula says 0.
    """
    p = percent / 100
    return 100 * math.sqrt(p * (1 - p) / images + 1 / (4 * images**2)) / (1 + 1 / images)


def text(report: Report, quality: Quality) -> str:
    """Return text for a terminal: what ran, a row for each cell, and methods by budgets as in the paper's tables."""
    report = _with_budgets(report)
    parts = [_headlines(report), _rows(report, quality)]
    reduced = [result for result in report["results"] if result["name"] != "dense"]
    if len({_budget(result) for result in reduced}) > 1 and len({result["name"] for result in reduced}) > 1:
        parts += [_pivot(report, metric, quality.metrics[metric]) for metric in quality.main(report)]
    if notes := _notes(report, quality):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _headlines(report: Report) -> str:
    """Return lines on the model, the data, the machine, and the methods with options that are not their defaults."""
    model, data, settings, machine = (report[part] for part in ("model", "data", "settings", "machine"))
    where = machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads"
    several = f", {settings['processes']} processes" if settings["processes"] > 1 else ""
    lines = [
        f"{model['name']} ({model['weights']}) on {data['name']} ({data['chosen']}): {data['images']} images of "
        f"{data['classes']} classes, {report['inputs']['in_words']}",
        f"{where}{several}, batch {settings['batch_size']}, {settings['dtype']}; img/s is the model alone, without "
        "reading images",
    ]
    configs = [result["config"] for result in report["results"] if result["config"] is not None]
    if parts := dict.fromkeys(part for config in configs for part in _how(config)):
        lines.append(", ".join(parts))
    return "\n".join(lines)


def _kind(results: Sequence[Result]) -> str:
    """Return the kind of budget, a key of _BUDGETS, that the results have."""
    return next((kind for kind in _BUDGETS for result in results if result.get(kind) is not None), "keep_rate")


def _with_budgets(report: Report) -> Report:
    """Return the report with the budget of each result as a number, by which its results can be ordered."""
    return {**report, "results": [{**result, **_numbers(result)} for result in report["results"]]}


def _numbers(result: Result) -> dict[str, Any]:
    if result["config"] is None:
        return {}
    config = ReductionConfig.from_dict(result["config"])
    if config.schedule is not None:  # 0 where it cannot run
        return {"tokens_left": fmean(result.get("counts") or [0]), "schedule": str(config.schedule)}
    return {"threshold": config.threshold} if config.keep_rate is None else {"keep_rate": config.keep_rate}


def _budget(result: Result) -> str:
    """Return the budget of a result without its kind, which the column's title names."""
    return budget_of(result).rpartition(" ")[2]


def _how(config: Mapping[str, Any]) -> list[str]:
    """Return how a config reduces a model, without its budget: the method with its options, then the other fields."""
    given = ReductionConfig.from_dict(config)
    fields = {name: value for name, value in given.given().items() if name not in BUDGETS and name not in given.options}
    return [str(given.create_method()), *(f"{name}={format_value(value)}" for name, value in fields.items())]


def _rows(report: Report, quality: Quality) -> str:
    results = report["results"]
    metrics = [name for name in quality.metrics if any(name in result for result in results)]
    # By processor: a speed is compared with that of the dense model on the same one.
    dense = {r.get("processor"): r["images_per_second"] for r in results if r["name"] == "dense"}
    columns = [Column(title, left=True) for title in (_BUDGETS[_kind(results)][0], "method", "tokens left")]
    columns += [Column(title, ".2f") for title in ("GFLOPs", *(quality.metrics[name] for name in metrics))]
    columns += [Column("img/s", ".1f"), *([Column("x dense", ".2f")] if dense else [])]
    rows: list[list[Any]] = []
    for result in results:
        row = [_budget(result), result["name"]]
        if "cannot" in result:
            row.append(CANNOT)
        else:
            speed, of_dense = result["images_per_second"], dense.get(result.get("processor"))
            row += [_tokens(result), result["gflops"], *(result[name] for name in metrics), speed]
            row += [speed / of_dense] if of_dense else []
        rows.append(row + [None] * (len(columns) - len(row)))
    return Table(columns, rows).text()


def _tokens(result: Result) -> str:
    if result["counts"] is None:
        return "all" if result["name"] == "dense" else "differ"
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies'].replace('_', ' ')} {counts}"


def _pivot(report: Report, metric: str, title: str) -> str:
    """Return a table of methods by budgets, from many tokens to few, as the paper's off-the-shelf table."""
    kind = _kind(report["results"])
    # A high keep rate leaves many tokens, a high threshold few.
    order = sorted(
        (result for result in report["results"] if result.get(kind) is not None),
        key=lambda result: (_schedule_kind(result), result[kind] if kind == "threshold" else -result[kind]),
    )
    budgets = list(dict.fromkeys(map(_budget, order)))
    rows: list[list[Any]] = []
    for name in dict.fromkeys(result["name"] for result in report["results"]):
        found = {_budget(result): result.get(metric, CANNOT) for result in report["results"] if result["name"] == name}
        # The dense model has no budget: its one value stands in the first column.
        rows.append([name, *map(found.get, budgets if name != "dense" else ["", *budgets[1:]])])
    return Table([Column(title, left=True), *(Column(budget, ".2f") for budget in budgets)], rows).text()


def _notes(report: Report, quality: Quality) -> list[str]:
    data, results = report["data"], report["results"]
    notes = []
    for metric in quality.fractions[:1]:
        if errors := [sampling_error(result[metric], data["images"]) for result in results if metric in result]:
            title = quality.metrics[metric]
            notes.append(f"sampling error of {title} on {data['images']} images: up to {max(errors):.2f} points")
    if busy := load_warning(report["machine"]):
        notes.append(busy)
    ran_on = sorted({result["processor"] for result in results if result.get("processor")})
    if len(ran_on) > 1:
        notes.append(f"speeds are of several processors ({', '.join(ran_on)}); x dense compares those of one")
    notes += data["remarks"]
    if data["skipped"]:
        notes.append(f"skipped {len(data['skipped'])}: {'; '.join(data['skipped'][:3])}")
    cannot = (result for result in results if "cannot" in result)
    return notes + [f"cannot: {result['name']} at {_budget(result)}: {result['cannot']}" for result in cannot]


def _schedule_kind(result: Result) -> str:
    """Return the kind of schedule; schedules of one kind are points of one curve."""
    return (result.get("schedule") or "").partition(":")[0]


def _line(result: Result) -> tuple[str, ...]:
    """Return what distinguishes the curves of a plot: name, schedule, the method's options, how it is applied."""
    method, *others = _how(result["config"])
    return result["name"], _schedule_kind(result), *method.partition(":")[2].split(","), *others


def _label(line: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Return the label of a curve: its name, and what distinguishes it from others of the same name."""
    alike = [other for other in lines if other[0] == line[0]]
    return ", ".join([line[0], *(part for part in line[1:] if part and not all(part in other for other in alike))])


def plot(report: Report, path: Path, quality: Quality) -> None:
    """Plot each main metric against the budget, and the first one against speed.

    Each method is a curve, the dense model a grey level. Metrics have their standard error where it is known, speeds
    their range where it was measured.
    """
    report = _with_budgets(report)
    metrics = quality.main(report)
    done = [result for result in report["results"] if "cannot" not in result]
    kind = _kind(done)
    ticks = sorted({result.get(kind) for result in done} - {None})
    panels = [_panel(done, metric, kind, quality, ticks) for metric in metrics]
    panels.append(_panel(done, metrics[0], "images_per_second", quality))
    data, settings = report["data"], report["settings"]
    where = report["machine"]["gpu"] or f"{report['machine']['cpu']}, {settings['threads']} threads"
    title = (
        f"{report['model']['name']}, {data['name']}, {data['images']} images\n{where}, batch {settings['batch_size']}"
    )
    known = any(_errors(done, metric, quality) for metric in metrics)
    notes = [f"bars and grey band: standard error of {data['images']} images"] if known else []
    notes += ["horizontal bars: half of the turns"] if _speed_ranges(done) else []
    draw_curves(panels, path, title=title, note="; ".join(notes), share_y=len(metrics) == 1)


def _panel(
    done: list[Result], metric: str, against: str, quality: Quality, ticks: Sequence[float] | None = None
) -> CurvePanel:
    """Return a panel with a metric against a budget, or against images per second."""
    by_speed, order = against not in _BUDGETS, _kind(done)
    by_line: dict[tuple[str, ...], list[Result]] = {}
    for result in done:
        if result["config"] is not None:
            by_line.setdefault(_line(result), []).append(result)
    curves, level = [], None
    for line, results in by_line.items():
        results.sort(key=lambda result: result[order])
        x, values = ([result[name] for result in results] for name in (against, metric))
        ranges = _speed_ranges(results) if by_speed else None
        curves.append(Curve(_label(line, list(by_line)), x, values, _errors(results, metric, quality), ranges))
    for result in (result for result in done if result["name"] == "dense"):
        errors, ranges = _errors([result], metric, quality), _speed_ranges([result])
        at = {"x": result[against], "x_range": ranges[0] if ranges else None} if by_speed else {}
        level = Level(result[metric], errors[0] if errors else None, **at)
    x_label = "images per second (model alone)" if by_speed else _BUDGETS[against][1]
    y_label = f"{quality.metrics[metric]} (%)"
    return CurvePanel(curves, x_label, y_label, level, x_ticks=ticks, from_zero=by_speed)


def _errors(results: list[Result], metric: str, quality: Quality) -> list[float] | None:
    """Return the sampling errors; None for a metric whose errors are not known."""
    if metric not in quality.fractions:
        return None
    return [sampling_error(result[metric], result["images"]) for result in results]


def _speed_ranges(results: list[Result]) -> list[tuple[float, float]] | None:
    """Return the range of speeds of half of the turns; None where speeds were not measured in turns."""
    if not results or any(result.get("spread") is None for result in results):
        return None
    speeds = ((result["images_per_second"], result["spread"] / 2) for result in results)
    return [(speed - half, speed + half) for speed, half in speeds]
