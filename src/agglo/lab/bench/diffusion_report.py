"""The diffusion benchmark as a table and as a picture, both from what its JSON file holds."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from agglo.drawing.charts import Bar, BarPanel, draw_bars
from agglo.lab.bench.diffusion_rows import DENSE, TOMESD, WITHOUT
from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table

Record = dict[str, Any]
GOAL = 0.5  # the keep rate at which a step must take no longer than tomesd's
_COLUMNS = (
    Column("keep", "g", left=True),
    Column("variant", left=True),
    Column("s per step", ".2f"),
    Column("least", ".2f"),
    Column("most", ".2f"),
    Column("to dense", ".3f"),
    Column("to tomesd", ".3f"),
    Column("clustering, s", ".2f"),
    Column("error, %", ".2f"),
    Column("of attention, %", ".2f"),
)


def is_finished(record: Record) -> bool:
    """Whether every row has run all its steps in all repeats; what follows needs that."""
    repeats = record["settings"]["repeats"]
    return all(row["cannot"] or len(row["calls"]) == repeats * len(row["steps"]) for row in record["rows"])


def summaries(record: Record) -> list[Record]:
    """Return the numbers of each row that has run; None where one makes no sense.

    They are name, keep_rate, seconds, least, most, to_dense, to_tomesd, clustering, error and attention_error.
    """
    rows = [row for row in record["rows"] if row["calls"]]
    dense = next(row for row in rows if row["name"] == DENSE)
    tomesd = {row["keep_rate"]: row for row in rows if row["name"] == TOMESD}
    return [_summary(row, dense, tomesd.get(row["keep_rate"])) for row in rows]


def _summary(row: Record, dense: Record, tomesd: Record | None) -> Record:
    is_timed = row["name"] != WITHOUT
    seconds = [call["seconds"] for call in row["calls"]]
    steps = _compared_steps(row)
    errors = [call for call in row["calls"] if call["step"] in steps and "error" in call]
    return {
        "name": row["name"],
        "keep_rate": row["keep_rate"],
        "seconds": _per_step(row, "seconds") if is_timed else None,
        "least": min(seconds) if is_timed else None,
        "most": max(seconds) if is_timed else None,
        "to_dense": ratio(row, dense) if is_timed else None,
        "to_tomesd": ratio(row, tomesd) if is_timed and tomesd is not None else None,
        "clustering": _per_step(row, "clustering") if row["keep_rate"] is not None else None,
        "error": mean(call["error"] for call in errors) if errors else None,
        "attention_error": mean(call["attention_error"] for call in errors) if errors else None,
    }


def _compared_steps(row: Record) -> set[int]:
    """The steps that all rows run: errors of others would not be comparable."""
    steps = {call["step"] for call in row["calls"]}
    return {min(steps), (max(steps) + 1) // 2, max(steps)}


def _per_step(row: Record, what: str) -> float:
    """The median; where steps differ in cost, the median over generations of their means."""
    return median(_by_turn(row, what, per_generation=row["keeps"]).values())


def ratio(row: Record, other: Record) -> float:
    """The median of the ratios within each step, or within each generation where steps differ in cost."""
    per_generation = row["keeps"] or other["keeps"]
    ours, theirs = (_by_turn(one, "seconds", per_generation) for one in (row, other))
    return median(ours[turn] / theirs[turn] for turn in ours if turn in theirs)


def _by_turn(row: Record, what: str, per_generation: bool) -> dict[tuple[int, ...], float]:
    if not per_generation:
        return {(call["repeat"], call["step"]): call[what] for call in row["calls"]}
    ordered = sorted(row["calls"], key=lambda call: call["repeat"])
    groups = groupby(ordered, key=lambda call: call["repeat"])
    return {(repeat,): mean(call[what] for call in calls) for repeat, calls in groups}


def body(record: Record) -> Table:
    """The table, rows that cannot run included."""
    found = {(row["name"], row["keep_rate"]): row for row in summaries(record)}
    names = ("seconds", "least", "most", "to_dense", "to_tomesd", "clustering", "error", "attention_error")
    rows = []
    for row in record["rows"]:
        numbers = found.get((row["name"], row["keep_rate"]))
        cells = [CANNOT if row["cannot"] else None] + [None] * (len(names) - 1)
        rows.append([row["keep_rate"], row["name"], *(cells if numbers is None else map(numbers.get, names))])
    for cells in rows:
        cells[-2:] = [None if share is None else 100 * share for share in cells[-2:]]
    return Table(_COLUMNS, rows)


def table(record: Record) -> str:
    """Text for a terminal."""
    lines = [*headlines(record), body(record).text(), *notes(record)]
    if busy := load_warning(record["machine"]):
        lines.append(busy)
    return "\n".join(lines)


def headlines(record: Record) -> tuple[str, str]:
    """What ran, and where."""
    chosen, found = record["settings"], record["machine"]
    timesteps = [call["timestep"] for row in record["rows"] if row["name"] == DENSE for call in row["calls"]]
    what = (
        f"{chosen['architecture']}, random weights, {chosen['size']} x {chosen['size']} pixels ({record['tokens']} "
        f"tokens), batch {chosen['batch']}, {chosen['dtype']}, timesteps {', '.join(map(str, timesteps))}"
    )
    where = found["gpu"] or f"{found['cpu']}, {found['threads']} threads"
    versions = [f"{name} {found[name]}" for name in ("torch", "diffusers", "tomesd") if found[name]]
    return what, ", ".join([where, *versions, found["date"][:10]])


def notes(record: Record) -> list[str]:
    """What could not run, what the errors tell, and whether the goal was met."""
    lines = [
        f"not run: {row['name']} at keep {row['keep_rate']:g}: {row['cannot']}"
        for row in record["rows"]
        if row["cannot"]
    ]
    return [*lines, *_what_errors_tell(record), *goals(record)]


def _what_errors_tell(record: Record) -> list[str]:
    lines = [
        "The weights are random: times are those of the architecture, but tokens are not those of pictures, and which "
        "variant errs least depends on how evenly attention spreads.",
        f"Queries are multiplied by {record['settings']['query_gain']:g}: in the first block one spreads over "
        f"{record['attended_share']:.0%} of the tokens. At 100 % attention would be a plain mean.",
    ]
    without = next(row for row in summaries(record) if row["name"] == WITHOUT)
    lines.append(
        f"Without what the merged self-attentions give at all, the prediction is {without['error']:.1%} off: errors "
        "are to be read against that."
    )
    return lines


def goals(record: Record) -> list[str]:
    """Every variant of agglo at the goal's keep rate beside tomesd.

    Its time is judged; its error is only told, since the weights are random.
    """
    found = [row for row in summaries(record) if row["keep_rate"] == GOAL]
    tomesd = next((row for row in found if row["name"] == TOMESD), None)
    if tomesd is None:
        return [f"goal: not judged, tomesd was not measured at keep {GOAL:g}"]
    lines = []
    for row in found:
        if row["name"].startswith("atc"):
            met = "met" if row["to_tomesd"] <= 1 else "MISSED"
            lines.append(
                f"{met}: {row['name']} at keep {GOAL:g}: {row['to_tomesd']:.3f} of tomesd's time (at most 1); "
                f"{row['error'] / tomesd['error']:.2f} of its error"
            )
    return lines


def plot(record: Record, path: Path) -> None:
    """Bars of seconds per step, one group per keep rate, least to most as whiskers."""
    found = [row for row in summaries(record) if row["seconds"] is not None]
    groups = [list(map(_bar, group)) for _, group in groupby(found, key=lambda row: row["keep_rate"])]
    panel = BarPanel(groups, "seconds per step (of dense; error)")
    draw_bars(
        [[panel]], path, title="\n".join(headlines(record)), note="whiskers: fastest and slowest step; random weights"
    )


def _bar(row: Record) -> Bar:
    error = "" if row["error"] is None else f"; {row['error']:.1%}"
    label = row["name"] if row["keep_rate"] is None else f"{row['name']}, keep {row['keep_rate']:g}"
    note = f"{row['seconds']:.2f}  ({row['to_dense']:.2f}{error})"
    return Bar(row["name"], row["seconds"], row["least"], row["most"], note, label)
