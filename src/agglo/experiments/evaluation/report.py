"""An evaluation as tables and as a picture: of what a task's `grid.run` gives, or of what its JSON file holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.experiments.machine import load_warning
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.experiments.variants import describe_budget

# What a result calls its budget, the column's title, and the axis's.
_BUDGETS = {
    "keep_rate": ("keep", "keep rate at each stage"),
    "threshold": ("threshold", "threshold"),
    "tokens_left": ("schedule", "patch tokens left after a block, on average"),
}


@dataclass(frozen=True)
class Quality:
    """What a task says about how good answers are.

    metrics: the names that results may have and the titles of their columns.
    main: of those that the results have, the ones that get a table of methods by budgets, and a plot.
    error: the standard error of a metric's value in a result; None where it is not known.
    error_note: what is to be said about these errors below the table, of the results and the number of images.
    """

    metrics: dict[str, str]
    main: Callable[[dict[str, Any]], Sequence[str]]
    error: Callable[[dict[str, Any], str], float | None] = lambda result, metric: None
    error_note: Callable[[Sequence[dict[str, Any]], int], str | None] = lambda results, images: None


def text(report: dict[str, Any], quality: Quality) -> str:
    """For a terminal: what ran, a row for each cell, and for a real grid the paper's kind of table."""
    report = _with_tokens_left(report)
    parts = ["\n".join(headlines(report)), _rows(report, quality)]
    reduced = [result for result in report["results"] if result["name"] != "dense"]
    if len({_budget(result) for result in reduced}) > 1 and len({result["name"] for result in reduced}) > 1:
        parts += [_pivot(report, metric, quality.metrics[metric]) for metric in quality.main(report)]
    if notes := _notes(report, quality):
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
    parts += _place(reduced[0])
    return [", ".join(parts)]


def _place(result: dict[str, Any]) -> list[str]:
    """Where a method acts, if not at its own place, and whether unread patches are dropped."""
    return [
        *([result["acts"]] if result.get("acts") else []),
        *(["unread patches dropped"] if result.get("unread") else []),
    ]


def _where(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    several = f", {settings['processes']} processes" if settings["processes"] > 1 else ""
    return (machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads") + several


def _rows(report: dict[str, Any], quality: Quality) -> str:
    results = report["results"]
    metrics = [name for name in quality.metrics if any(name in result for result in results)]
    # By processor: a speed is compared with that of the dense model on the same one.
    dense = {r.get("processor"): r["images_per_second"] for r in results if r["name"] == "dense"}
    budget_title, _ = _BUDGETS[_kind(report)]
    columns = [Column(title, left=True) for title in (budget_title, "variant", "tokens left")]
    columns += [
        Column("GFLOPs", ".2f"),
        *(Column(quality.metrics[name], ".2f") for name in metrics),
        Column("img/s", ".1f"),
    ]
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
        return "all" if result["name"] == "dense" else "differ"
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies']} {counts}"


def _pivot(report: dict[str, Any], metric: str, title: str) -> str:
    """Methods by their budgets, from many tokens to few, as in the paper's off-the-shelf table."""
    kind = _kind(report)
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
    return Table([Column(title, left=True), *(Column(budget, ".2f") for budget in budgets)], rows).text()


def _notes(report: dict[str, Any], quality: Quality) -> list[str]:
    data = report["data"]
    notes = []
    if of_errors := quality.error_note(report["results"], data["images"]):
        notes.append(of_errors)
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


def _schedule_kind(result: dict[str, Any]) -> str:
    """Schedules of one kind are points of one line."""
    return (result.get("schedule") or "").partition(":")[0]


def _line(result: dict[str, Any]) -> tuple[str, ...]:
    """What tells the lines of a plot apart: the name, the schedule, the method's options, how it is applied."""
    proportional = result["proportional"]
    attention = "" if proportional is None else f"proportional attention {'on' if proportional else 'off'}"
    options = (result["method"] or "").partition(":")[2]
    return result["name"], _schedule_kind(result), *options.split(","), attention, *_place(result)


def _labels(lines: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Lines by their names; where a file holds a method twice, with what the two do not share."""
    found = {}
    for line in lines:
        alike = [other for other in lines if other[0] == line[0]]
        own = [part for part in line[1:] if part and not all(part in other for other in alike)]
        found[line] = ", ".join([line[0], *own])
    return found


def plot(report: dict[str, Any], path: Path, quality: Quality) -> None:
    """Each main metric against the budget, and the first one against speed: a line for each variant, the dense model as
    a grey level; metrics with their standard error where it is known, speeds with their range where it was measured."""
    report = _with_tokens_left(report)
    kind = _kind(report)
    metrics = quality.main(report)
    done = [result for result in report["results"] if "cannot" not in result]
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
    done: list[dict[str, Any]], metric: str, against: str, quality: Quality, ticks: Sequence[float] | None = None
) -> CurvePanel:
    """A metric against a budget, or against images per second."""
    by_speed = against not in _BUDGETS
    lines = list(dict.fromkeys(_line(result) for result in done if result["name"] != "dense"))
    order = _kind({"results": done})
    curves, level = [], None
    for line, label in _labels(lines).items():
        of_line = sorted((result for result in done if _line(result) == line), key=lambda result: result[order])
        ranges = _speed_ranges(of_line) if by_speed else None
        values = [result[metric] for result in of_line]
        x = [result[against] for result in of_line]
        curves.append(Curve(label, x, values, _errors(of_line, metric, quality), ranges))
    for result in (result for result in done if result["name"] == "dense"):
        errors, ranges = _errors([result], metric, quality), _speed_ranges([result])
        level = Level(result[metric], errors[0] if errors else None)
        if by_speed:
            level = replace(level, x=result[against], x_range=ranges[0] if ranges else None)
    x_label = "images per second (model alone)" if by_speed else _BUDGETS[against][1]
    y_label = f"{quality.metrics[metric]} (%)"
    return CurvePanel(curves, x_label, y_label, level, x_ticks=ticks, from_zero=by_speed)


def _errors(results: list[dict[str, Any]], metric: str, quality: Quality) -> list[float] | None:
    """Standard errors; None for a metric whose errors are not known."""
    errors = [quality.error(result, metric) for result in results]
    known = [error for error in errors if error is not None]
    return known if known and len(known) == len(errors) else None


def _speed_ranges(results: list[dict[str, Any]]) -> list[tuple[float, float]] | None:
    """Half of the turns of each were between these speeds; None where speeds were not taken in turns."""
    if not results or any(result.get("spread") is None for result in results):
        return None
    speeds = ((result["images_per_second"], result["spread"] / 2) for result in results)
    return [(speed - half, speed + half) for speed, half in speeds]
