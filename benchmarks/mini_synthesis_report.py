"""The tables of the synthesis in miniature, from its JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.marks import write_between_marks

PAGE = Path(__file__).parents[1] / "docs" / "mini-synthesis.md"
MARK = "synthesis in miniature"
_KINDS = {"classifier": "the embedded classifier's features", "inception": "Inception's features"}


def write(folder: Path, page: Path = PAGE) -> None:
    """The tables, into their place on a page."""
    write_between_marks(page, MARK, tables(folder))


def tables(folder: Path) -> str:
    names = ("errors", "samplings", "distances", "times")
    errors, samplings, distances, times = (_read(folder / f"{name}.json") for name in names)
    found = distances["machine"]
    parts = [
        f"({found['cpu']}, {found['date'][:10]}; `{distances['command']}`)",
        f"Relative error of a prediction against the dense one (%), {errors['images']} test images, "
        f"mean over steps {', '.join(map(str, errors['levels']))} of 1000\n\n"
        + table(errors["rows"], lambda row: f"{100 * row['error']:.1f}"),
        f"Relative error of the picture after all steps against the dense one's (%), {samplings['images']} pictures\n\n"
        + table(samplings["rows"], lambda row: f"{100 * row['error']:.1f}"),
    ]
    dense = distances["rows"][0]
    for kind, described in _KINDS.items():
        if kind in dense:
            rows = [row for row in distances["rows"][1:] if kind in row]
            parts.append(
                f"Frechet distance by {described}: {distances['sets']} sets of {distances['images_per_set']} images "
                f"against {distances['reference_images']} test images, mean ± deviation over sets; "
                f"dense {_spread(dense[kind])}\n\n" + table(rows, lambda row, kind=kind: _spread(row[kind]))
            )
            parts.append(
                "The same, difference to dense with the same seeds\n\n"
                + table(
                    rows,
                    lambda row, kind=kind: _spread([a - b for a, b in zip(row[kind], dense[kind], strict=True)], "+"),
                )
            )
    parts.append(
        f"Time of one call of the model in proportion to the dense one's, in turns; dense "
        f"{times['rows'][0]['ms_per_image']:.1f} ms per image\n\n"
        + table(times["rows"][1:], lambda row: f"{row['of_dense']:.2f}")
    )
    return "\n\n".join(parts)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _spread(values: Sequence[float], sign: str = "") -> str:
    """Mean, and deviation where there are several."""
    middle = f"{mean(values):{sign}.2f}"
    return middle if len(values) < 2 else f"{middle} ± {stdev(values):.2f}"


def table(rows: Sequence[dict[str, Any]], entry: Any) -> str:
    """One line per way to reduce, one column per keep rate."""
    by_kind: dict[str, dict[str, str]] = {}
    for row in rows:
        kind, _, rate = row["cell"].rpartition("_keep")
        by_kind.setdefault(kind, {})[rate] = entry(row)
    rates = list(dict.fromkeys(rate for cells in by_kind.values() for rate in cells))
    lines = [f"| keep rate | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(cells.get(rate, '') for rate in rates)} |" for kind, cells in by_kind.items()]
    return "\n".join(lines)
