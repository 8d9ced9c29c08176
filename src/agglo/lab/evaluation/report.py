"""Tables and plots of an evaluation, from what `EvaluationGrid.run` returns or from its JSON file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from agglo.config import BUDGETS, ReductionConfig
from agglo.drawing.charts import Curve, CurvePanel, DenseLine, draw_curves
from agglo.text import format_value
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table

Report = dict[str, Any]
# The column's title and the axis's, for each field of a config that is a budget.
_TITLES = {
    "keep_rate": ("keep", "keep rate at each stage"),
    "flops": ("FLOPs", "fraction of the dense model's FLOPs"),
    "threshold": ("threshold", "threshold"),
    "schedule": ("schedule", "patch tokens left after a block, on average"),
}


@dataclass(frozen=True)
class TaskMetrics:
    """The metrics of a task."""

    metrics: dict[str, str]  # names in results, and the titles of their columns
    main: Sequence[str]  # those that get a table of methods by budgets, and a plot
    fractions: Sequence[str] = ()  # those that are fractions of the images, whose sampling error is therefore known


class _Row:
    """A result, with its config, which is None for the dense model, and its budget."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result, self.name = result, result["name"]
        self.kind, self.level, self.budget, self.config = "", 0.0, "", None
        if result["config"] is None:
            return
        self.config = config = ReductionConfig.from_dict(result["config"])
        self.kind = next(name for name in _TITLES if getattr(config, name) is not None)
        # The budget as a number, by which rows of one kind are ordered. A schedule that cannot run has no counts.
        self.level = fmean(result.get("counts") or [0]) if self.kind == "schedule" else getattr(config, self.kind)
        self.budget = config.budget.rpartition(" ")[2]  # without its kind, which the column's title names
        given = {n: value for n, value in config.given().items() if n not in BUDGETS and n not in config.options}
        self.how = [str(config.create_method()), *(f"{name}={format_value(value)}" for name, value in given.items())]
        method, *others = self.how
        self.schedule = str(config.schedule or "").partition(":")[0]
        # What distinguishes the curves of a plot.
        self.line = (self.name, self.schedule, *method.partition(":")[2].split(","), *others)

    def speed_range(self) -> tuple[float, float] | None:
        """Return the range of speeds of half of the turns; None where speeds were not measured in turns."""
        speed, spread = self.result["images_per_second"], self.result.get("spread")
        return None if spread is None else (speed - spread / 2, speed + spread / 2)

    def error(self, metric: str, task: TaskMetrics) -> float | None:
        """Return the sampling error of a metric; None where it is not known."""
        return sampling_error(self.result[metric], self.result["images"]) if metric in task.fractions else None


def sampling_error(percent: float, images: int) -> float:
    """Return the sampling error of an accuracy in points: half the width of Wilson's interval at one deviation.

    With p = percent / 100 and n images that is

        100 * sqrt(p (1 - p) / n + 1 / (4 n^2)) / (1 + 1 / n)

    For many images it is the usual standard error, sqrt(p (1 - p) / n). For few images it stays honest: 0 of 4 right is
    an error of 10 points, where the usual formula says 0.
    """
    p = percent / 100
    return 100 * math.sqrt(p * (1 - p) / images + 1 / (4 * images**2)) / (1 + 1 / images)


def _opened(report: Report, task: TaskMetrics) -> tuple[list[_Row], list[str], str]:
    """Return the rows, the metrics they have, and the kind of budget of their table."""
    rows = [_Row(result) for result in report["results"]]
    metrics = [name for name in task.metrics if any(name in row.result for row in rows)]
    return rows, metrics, next((kind for kind in _TITLES for row in rows if row.kind == kind), "keep_rate")


def text(report: Report, task: TaskMetrics) -> str:
    """Return text for a terminal: what ran, a row for each cell, and methods by budgets as in the paper's tables."""
    rows, metrics, kind = _opened(report, task)
    parts = [_headlines(report, rows), _all_rows(rows, metrics, kind, task)]
    reduced = [row for row in rows if row.config is not None]
    if len({row.budget for row in reduced}) > 1 and len({row.name for row in reduced}) > 1:
        parts += [_pivot(rows, name, kind, task) for name in metrics if name in task.main]
    if notes := _notes(report, rows, task):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _headlines(report: Report, rows: Sequence[_Row]) -> str:
    """Return lines on the model, the data, the machine, and the methods with options that are not their defaults."""
    model, data, settings = (report[part] for part in ("model", "data", "settings"))
    several = f", {settings['processes']} processes" if settings["processes"] > 1 else ""
    lines = [
        f"{model['name']} ({model['weights']}) on {data['name']} ({data['chosen']}): {data['images']} images of "
        f"{data['classes']} classes, {report['inputs']['in_words']}",
        f"{_where(report)}{several}, batch {settings['batch_size']}, {settings['dtype']}; img/s is the model alone, "
        "without reading images",
    ]
    if parts := dict.fromkeys(part for row in rows if row.config is not None for part in row.how):
        lines.append(", ".join(parts))
    return "\n".join(lines)


def _where(report: Report) -> str:
    machine = report["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {report['settings']['threads']} threads"


def _all_rows(rows: Sequence[_Row], metrics: Sequence[str], kind: str, task: TaskMetrics) -> str:
    # By processor: a speed is compared with that of the dense model on the same one.
    dense = {row.result.get("processor"): row.result["images_per_second"] for row in rows if row.config is None}
    columns = [Column(title, left=True) for title in (_TITLES[kind][0], "method", "tokens left")]
    columns += [Column(title, ".2f") for title in ("GFLOPs", *(task.metrics[name] for name in metrics))]
    columns += [Column("img/s", ".1f"), *([Column("x dense", ".2f")] if dense else [])]
    lines: list[list[Any]] = []
    for row in rows:
        result = row.result
        line: list[Any] = [CANNOT]
        if "cannot" not in result:
            speed, of_dense = result["images_per_second"], dense.get(result.get("processor"))
            line = [_tokens(result), result["gflops"], *(result[name] for name in metrics), speed]
            line += [speed / of_dense] if of_dense else []
        lines.append([row.budget, row.name, *line, *[None] * (len(columns) - 2 - len(line))])
    return Table(columns, lines).text()


def _tokens(result: dict[str, Any]) -> str:
    if result["counts"] is None:
        return "all" if result["name"] == "dense" else "differ"
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    return counts if result["varies"] == "no" else f"{result['varies'].replace('_', ' ')} {counts}"


def _pivot(rows: Sequence[_Row], metric: str, kind: str, task: TaskMetrics) -> str:
    """Return a table of methods by budgets, from many tokens to few, as the paper's off-the-shelf table."""
    # A high keep rate leaves many tokens, a high threshold few.
    order = sorted(
        (row for row in rows if row.kind == kind),
        key=lambda row: (row.schedule, row.level if kind == "threshold" else -row.level),
    )
    budgets = list(dict.fromkeys(row.budget for row in order))
    lines: list[list[Any]] = []
    for name in dict.fromkeys(row.name for row in rows):
        found = {row.budget: row.result.get(metric, CANNOT) for row in rows if row.name == name}
        # The dense model has no budget: its one value stands in the first column.
        lines.append([name, *map(found.get, budgets if name != "dense" else ["", *budgets[1:]])])
    columns = [Column(task.metrics[metric], left=True), *(Column(budget, ".2f") for budget in budgets)]
    return Table(columns, lines).text()


def _notes(report: Report, rows: Sequence[_Row], task: TaskMetrics) -> list[str]:
    data, notes = report["data"], []
    for metric in task.fractions[:1]:
        if errors := [sampling_error(row.result[metric], data["images"]) for row in rows if metric in row.result]:
            title = task.metrics[metric]
            notes.append(f"sampling error of {title} on {data['images']} images: up to {max(errors):.2f} points")
    if busy := load_warning(report["machine"]):
        notes.append(busy)
    processors = sorted({row.result["processor"] for row in rows if row.result.get("processor")})
    if len(processors) > 1:
        notes.append(f"speeds are of several processors ({', '.join(processors)}); x dense compares those of one")
    cannot = (row for row in rows if "cannot" in row.result)
    return [*notes, *(f"cannot: {row.name} at {row.budget}: {row.result['cannot']}" for row in cannot)]


def plot(report: Report, path: Path, task: TaskMetrics) -> None:
    """Plot each main metric against the budget, and the first one against speed.

    Each method is a curve, the dense model a grey level. Metrics have their standard error where it is known, speeds
    their range where it was measured.
    """
    rows, metrics, kind = _opened(report, task)
    metrics = [name for name in metrics if name in task.main]
    rows = [row for row in rows if "cannot" not in row.result]
    panels = [_panel(rows, metric, kind, task) for metric in metrics]
    panels.append(_panel(rows, metrics[0], None, task))
    data = report["data"]
    title = f"{report['model']['name']}, {data['name']}, {data['images']} images"
    title += f"\n{_where(report)}, batch {report['settings']['batch_size']}"
    known = any(metric in task.fractions for metric in metrics)
    notes = [f"bars and grey band: standard error of {data['images']} images"] if known else []
    notes += ["horizontal bars: half of the turns"] if all(row.speed_range() for row in rows) else []
    draw_curves(panels, path, title=title, note="; ".join(notes), share_y=len(metrics) == 1)


def _panel(rows: Sequence[_Row], metric: str, kind: str | None, task: TaskMetrics) -> CurvePanel:
    """Return a panel with a metric against budgets of a kind; None is against images per second."""
    reduced = [row for row in rows if row.config is not None and (kind is None or row.kind == kind)]
    lines = dict.fromkeys(row.line for row in reduced)
    curves = []
    for line in lines:
        of_line = sorted((row for row in reduced if row.line == line), key=lambda row: row.level)
        alike = [other for other in lines if other[0] == line[0]]  # curves of one name are labelled by what differs
        label = [line[0], *(part for part in line[1:] if part and not all(part in other for other in alike))]
        errors, ranges = [row.error(metric, task) for row in of_line], [row.speed_range() for row in of_line]
        curves.append(
            Curve(
                ", ".join(label),
                [row.result["images_per_second"] if kind is None else row.level for row in of_line],
                [row.result[metric] for row in of_line],
                [error for error in errors if error is not None] or None,
                ([each for each in ranges if each is not None] or None) if kind is None else None,
            )
        )
    level = None
    for row in rows:
        if row.config is None:
            at: dict[str, Any] = {"x": row.result["images_per_second"], "x_range": row.speed_range()}
            level = DenseLine(row.result[metric], row.error(metric, task), **({} if kind else at))
    return CurvePanel(
        curves,
        "images per second (model alone)" if kind is None else _TITLES[kind][1],
        f"{task.metrics[metric]} (%)",
        level,
        x_ticks=sorted({row.level for row in reduced}) if kind else None,
        from_zero=kind is None,
    )
