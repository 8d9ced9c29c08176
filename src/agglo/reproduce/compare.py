"""Measured beside printed: a value with its error, and tables that show both with their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from agglo.classification.evaluation.report import sampling_error
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.reproduce.item import Result

NOT_COMPARABLE = "printed (not comparable)"
_APART = 2.0  # standard errors


@dataclass(frozen=True)
class Value:
    """A number with what is known of its error.

    error: standard error, of the images it was measured on and of the seeds; None where it is not known.
    spread: standard deviation over seeds; None for one seed.
    """

    number: float
    error: float | None = None
    spread: float | None = None
    seeds: int = 1

    def __str__(self) -> str:
        return f"{self.number:.2f}" if self.spread is None else f"{self.number:.2f} ({self.spread:.2f})"

    def minus(self, other: Value) -> str:
        """The difference and its standard error, as far as errors are known.

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


def over_seeds(results: Sequence[Result], metric: str, *, images: str = "images") -> Value | str | None:
    """What the cells of one place in a table say together: a value, "cannot", or None if none was run.

    The error has two parts: of the images, which are the same for all seeds, and of the seeds. Shares of images that
    were right have both, other metrics the second one.
    """
    done = [result for result in results if metric in result]
    if not done:
        return CANNOT if any("cannot" in result for result in results) else None
    numbers = [float(result[metric]) for result in done]
    mean = fmean(numbers)
    spread = stdev(numbers) if len(numbers) > 1 else None
    parts = [] if spread is None else [spread / math.sqrt(len(numbers))]
    if metric in ("top1", "top5"):
        parts.append(sampling_error(mean, done[0][images]))
    return Value(mean, math.hypot(*parts) if parts else None, spread, len(numbers))


def printed_value(number: float | None, images: int | None = None) -> Value | None:
    """A printed number, with its sampling error if it is an accuracy on so many images."""
    if number is None:
        return None
    return Value(number, None if images is None else sampling_error(number, images))


def beside(
    title: str,
    rows: Sequence[str],
    columns: Sequence[Any],
    measured: Callable[[str, Any], Value | str | None],
    printed: Callable[[str, Any], Value | None],
    head: Callable[[Any], str] = str,
    *,
    comparable: bool = True,
) -> Table:
    """One line per row; for every column what was measured, what is printed, and the difference with its error.

    Columns in which nothing is printed have the measured value alone.
    comparable: False where the printed numbers are of another model and other data: the table says so, and has no
        differences.
    """
    heads, has_printed = [Column(title, left=True)], {}
    for column in columns:
        has_printed[column] = any(printed(row, column) is not None for row in rows)
        both_named = ("measured", "printed", "difference") if comparable else ("measured", NOT_COMPARABLE)
        names = both_named if has_printed[column] else ("measured",)
        heads += [Column(f"{head(column)} {name}".strip()) for name in names]
    lines = []
    for row in rows:
        line: list[Any] = [row]
        for column in columns:
            found, expected = measured(row, column), printed(row, column)
            line.append(None if found is None else str(found))
            if has_printed[column]:
                line.append(None if expected is None else f"{expected.number:.2f}")
            if has_printed[column] and comparable:
                both = isinstance(found, Value) and expected is not None
                line.append(found.minus(expected) if both else None)  # type: ignore[union-attr, arg-type]
        lines.append(line)
    return Table(heads, lines)


def disagreements(
    rows: Sequence[str],
    columns: Sequence[Any],
    measured: Callable[[str, Any], Value | str | None],
    printed: Callable[[str, Any], Value | None],
) -> str:
    """How many cells are further from what is printed than two standard errors, in words; empty if none is printed.
    Where the paper gives no error, ours counts alone; cells of which no error is known are counted apart."""
    pairs = [(measured(row, column), printed(row, column)) for row in rows for column in columns]
    both = [(found, expected) for found, expected in pairs if isinstance(found, Value) and expected is not None]
    known = [
        abs(found.number - expected.number) / math.hypot(found.error, expected.error or 0.0)
        for found, expected in both
        if found.error
    ]
    words = []
    if known:
        apart = sum(ratio > _APART for ratio in known)
        words.append(f"{apart} of {len(known)} cells differ from what is printed by more than two standard errors")
    if len(known) < len(both):
        words.append(f"of {len(both) - len(known)} cells no error is known")
    return "; ".join(words)


def unprinted(rows: Sequence[str], columns: Sequence[Any], printed: Callable[[str, Any], Value | None]) -> str:
    """Says so where the paper prints nothing for a whole table, as for a model that stands in; otherwise empty."""
    if any(printed(row, column) is not None for row in rows for column in columns):
        return ""
    return "The paper prints nothing for this model on these data."


def grouped(results: Sequence[Result], *names: str) -> dict[tuple[Hashable, ...], list[Result]]:
    """Results that agree in some values, by these values, in the order they come."""
    groups: dict[tuple[Hashable, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.get(name) for name in names), []).append(result)
    return groups


def percent(rate: float) -> str:
    return f"{100 * rate:g}%"


def reasons(results: Sequence[Mapping[str, Any]]) -> str:
    """Why cells cannot be run, every reason once."""
    found = dict.fromkeys(str(result["cannot"]) for result in results if "cannot" in result)
    return "\n".join(f"- cannot: {reason}" for reason in found)
