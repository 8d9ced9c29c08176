"""Measured and printed numbers: values with their errors, tables of both with their difference, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, DenseLine, draw_curves
from agglo.lab.evaluation.report import sampling_error
from agglo.lab.paper import printed
from agglo.lab.paper.study import Result
from agglo.utils.tables import CANNOT, Column, Table

DENSE, RELEASED = "dense", " as released"
_MOST = 4  # panels in a row: the data sets of the paper


@dataclass(frozen=True)
class Value:
    """A number with what is known of its error."""

    number: float
    error: float | None = None  # standard error, of the images it was measured on and of the seeds
    spread: float | None = None  # standard deviation over seeds; None for one seed

    def __str__(self) -> str:
        return f"{self.number:.2f}" if self.spread is None else f"{self.number:.2f} ({self.spread:.2f})"

    def minus(self, other: Value) -> str:
        """Return the difference and its standard error, as far as errors are known.

        >>> Value(71.5, 1.0).minus(Value(70.0, 0.2)), Value(3.5).minus(Value(4.0))
        ('+1.50 +- 1.02', '-0.50')
        >>> Value(3.5, 0.3).minus(Value(4.0))
        '-0.50 +- 0.30 (ours alone)'
        """
        difference = f"{self.number - other.number:+.2f}"
        if self.error is None:
            return difference
        if other.error is None:
            return f"{difference} +- {self.error:.2f} (ours alone)"
        return f"{difference} +- {math.hypot(self.error, other.error):.2f}"


def percent(rate: float) -> str:
    return f"{100 * rate:g}%"


def grouped(results: Sequence[Result], *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """Group results that agree in some values, by these values, in the order they come."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.get(name) for name in names), []).append(result)
    return groups


def over_seeds(results: Sequence[Result], metric: str) -> Value | str | None:
    """Return what results that differ in their seed say together: a value, "cannot", or None if none was run.

    The error has two parts: of the images, which are the same for all seeds, and of the seeds. Fractions of images that
    were right have both, and AP where a bootstrap said its error; other metrics have the second one.
    """
    done = [result for result in results if metric in result]
    if not done:
        return CANNOT if any("cannot" in result for result in results) else None
    numbers = [float(result[metric]) for result in done]
    mean = fmean(numbers)
    spread = stdev(numbers) if len(numbers) > 1 else None
    parts = [] if spread is None else [spread / math.sqrt(len(numbers))]
    bootstrapped = f"{metric.removesuffix('_AP')}_error"
    if metric in ("top1", "top5"):
        parts.append(sampling_error(mean, done[0]["images"]))
    elif all(bootstrapped in result for result in done):
        parts.append(fmean(result[bootstrapped] for result in done))
    return Value(mean, math.hypot(*parts) if parts else None, spread)


def metric_of(results: Sequence[Result]) -> str:
    """Return "mAP" where images have several labels, otherwise "top1"."""
    return "mAP" if any("mAP" in result for result in results) else "top1"


def dense_value(results: Sequence[Result], metric: str) -> Value | str | None:
    return over_seeds([result for result in results if result["method"] == DENSE], metric)


def printed_value(table: str, *keys: Any, images: int | None = None) -> Value | None:
    """Return a printed number, with its sampling error if it is an accuracy on so many images."""
    number = printed.value(table, *keys)
    return None if number is None else Value(number, None if images is None else sampling_error(number, images))


def printed_accuracy(table: str, model: str, data: str) -> Callable[[str, Any], Value | None]:
    """Return a function from method and keep rate to a printed number; methods as released have those of the paper."""
    images = printed.IMAGES.get(data)
    return lambda row, rate: printed_value(table, model, data, row.removesuffix(RELEASED), rate, images=images)


@dataclass(frozen=True)
class Comparison:
    """What was measured and what is printed, by row and column."""

    rows: Sequence[str]
    columns: Sequence[Any]
    measured: Callable[[str, Any], Value | str | None]
    expected: Callable[[str, Any], Value | None] = lambda row, column: None
    comparable: bool = True  # of the same model and data; otherwise a table says so, and has no differences

    def table(self, head: Callable[[Any], str] = percent, title: str = "method") -> Table:
        """Make a table of what was measured, what is printed, and the difference with its error, for every column.

        Columns in which nothing is printed have the measured value alone.
        """
        heads, lines = [Column(title, left=True)], {row: [row] for row in self.rows}
        for column in self.columns:
            names = ["measured"]
            if has_printed := any(self.expected(row, column) is not None for row in self.rows):
                names += ["printed", "difference"] if self.comparable else ["printed (not comparable)"]
            heads += [Column(f"{head(column)} {name}") for name in names]
            for row, line in lines.items():
                found, said = self.measured(row, column), self.expected(row, column)
                line.append("" if found is None else str(found))
                if has_printed:
                    line.append("" if said is None else f"{said.number:.2f}")
                if has_printed and self.comparable:
                    line.append(found.minus(said) if isinstance(found, Value) and said is not None else "")
        return Table(heads, list(lines.values()))

    def remarks(self) -> str:
        """Say how many cells are further from what is printed than two standard errors, or that nothing is printed.

        Where the paper gives no error, ours counts alone; cells of which no error is known are counted apart.
        """
        both = [(self.measured(row, over), self.expected(row, over)) for row in self.rows for over in self.columns]
        if all(said is None for _, said in both):
            return "The paper prints nothing for this model on these data."
        pairs = [(found, said) for found, said in both if isinstance(found, Value) and said is not None]
        known = [(a.number - b.number, math.hypot(a.error, b.error or 0.0)) for a, b in pairs if a.error]
        apart = sum(abs(difference) > 2 * error for difference, error in known)
        text = f"{apart} of {len(known)} cells differ from what is printed by more than two standard errors"
        return (
            f"{text}." if len(known) == len(pairs) else f"{text}; of {len(pairs) - len(known)} cells no error is known."
        )


def by_method(results: Sequence[Result], over: str, metric: str, **how: Any) -> Comparison:
    """Return what was measured over all seeds: methods but for the dense model, by the values of `over`, largest first.

    `how` are further fields of the comparison.
    """
    groups = grouped(results, "method", over)
    rows = list(dict.fromkeys(str(result["method"]) for result in results if result["method"] != DENSE))
    columns = sorted({result[over] for result in results} - {None}, reverse=True)
    return Comparison(rows, columns, lambda row, column: over_seeds(groups.get((row, column), []), metric), **how)


def by_rate(results: Sequence[Result], entry: Callable[[Result], Any], form: str = "") -> Table:
    """Make a table of one entry per method and keep rate, of results with one seed and without the dense model."""
    reduced = [result for result in results if result["keep_rate"] is not None]
    cells = {(r["method"], r["keep_rate"]): CANNOT if "cannot" in r else entry(r) for r in reduced}
    rates = sorted({rate for _, rate in cells}, reverse=True)
    rows = [[name, *(cells.get((name, rate)) for rate in rates)] for (name,) in grouped(reduced, "method")]
    return Table([Column("method", left=True), *(Column(percent(rate), form) for rate in rates)], rows)


def reasons(results: Sequence[Mapping[str, Any]]) -> str:
    """List why cells cannot be run, every reason once."""
    found = dict.fromkeys(str(result["cannot"]) for result in results if "cannot" in result)
    return "\n".join(f"- cannot: {reason}" for reason in found)


def curves(results: Sequence[Result], by: str, over: str, metric: str) -> list[Curve]:
    """Make a curve over the values of an axis, with errors, of all results that agree in a value."""
    found = []
    for (name,), here in grouped(results, by).items():
        values = {x: over_seeds(at, metric) for (x,), at in grouped(here, over).items() if x is not None}
        points = sorted((float(x), value) for x, value in values.items() if isinstance(value, Value))
        heights, errors = [value.number for _, value in points], [value.error or 0.0 for _, value in points]
        found.append(Curve(name, [x for x, _ in points], heights, errors if any(errors) else None))
    return found


def panel(
    results: Sequence[Result],
    metric: str,
    title: str,
    *,
    over: str = "keep_rate",
    x_label: str = "keep rate at each stage",
    y_label: str | None = None,
    faint: Callable[[str], bool] = lambda name: False,
) -> list[CurvePanel]:
    """Make a panel with a curve per method and the dense model as a dashed line; none where nothing was measured.

    Faint methods are thin and grey, and may lie outside.
    """
    reduced = [result for result in results if result["method"] != DENSE]
    found = [replace(each, faint=faint(each.name)) for each in curves(reduced, "method", over, metric) if each.x]
    dense = dense_value(results, metric)
    level = DenseLine(dense.number, dense.error) if isinstance(dense, Value) else None
    shown = [] if level is None else [(level.y, level.y_error or 0.0)]
    for curve in found:
        if not curve.faint:
            shown += zip(curve.y, curve.y_error or [0.0] * len(curve.y), strict=True)
    if not found or not shown:
        return []
    low, high = min(y - error for y, error in shown), max(y + error for y, error in shown)
    room, named = 0.06 * (high - low or 1), sorted({x for curve in found for x in curve.x})
    how: dict[str, Any] = {"x_ticks": named if len(named) < 8 else None, "y_limits": (low - room, high + room)}
    return [CurvePanel(found, x_label, y_label or f"{metric} (%)", level, title, **how)]


def draw_panels(panels: Sequence[CurvePanel], path: Path, note: str = "") -> list[Path]:
    """Draw a figure and return its path, if there is a panel to draw."""
    note = note or "bars and grey band: standard error of the images and of the seeds"
    if panels:
        draw_curves(panels, path, note=note, columns=_MOST if len(panels) > _MOST else None)
    return [path] if panels else []


def draw_accuracy(results: Sequence[Result], path: Path, faint: Callable[[str], bool]) -> list[Path]:
    """Draw accuracy by keep rate, a panel for every model and data set."""
    groups = grouped(results, "model", "data").items()
    panels = [each for names, here in groups for each in panel(here, metric_of(here), ", ".join(names), faint=faint)]
    return draw_panels(panels, path)
