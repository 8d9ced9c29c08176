"""The table of the diffusion benchmark, from what its JSON file holds."""

from __future__ import annotations

from itertools import groupby
from statistics import mean, median
from typing import Any

from agglo.utils.machine import load_warning
from agglo.utils.tables import CANNOT, Column, Table

Record = dict[str, Any]
DENSE, TOMESD, WITHOUT = "dense", "tomesd", "without self-attention"
GOAL = 0.5  # the keep rate at which a step must take no longer than tomesd's
_COLUMNS = {
    "keep_rate": Column("keep", "g", left=True),
    "name": Column("variant", left=True),
    "seconds": Column("s per step", ".2f"),
    "least": Column("least", ".2f"),
    "most": Column("most", ".2f"),
    "to_dense": Column("to dense", ".3f"),
    "to_tomesd": Column("to tomesd", ".3f"),
    "clustering": Column("clustering, s", ".2f"),
    "error": Column("error, %", ".2f"),
    "attention_error": Column("of attention, %", ".2f"),
}


def summaries(record: Record) -> list[Record]:
    """Return the numbers of each row, by the names of the table's columns; without those that make no sense."""
    dense = next(row for row in record["rows"] if row["name"] == DENSE)
    tomesd = {row["keep_rate"]: row for row in record["rows"] if row["name"] == TOMESD and row["calls"]}
    return [_summary(row, dense, tomesd.get(row["keep_rate"])) for row in record["rows"]]


def _summary(row: Record, dense: Record, tomesd: Record | None) -> Record:
    found: Record = {"name": row["name"], "keep_rate": row["keep_rate"]}
    if not row["calls"]:
        return {**found, "seconds": CANNOT}
    if row["name"] != WITHOUT:
        seconds = [call["seconds"] for call in row["calls"]]
        found |= {"seconds": _per_step(row, "seconds"), "least": min(seconds), "most": max(seconds)}
        found["to_dense"] = ratio(row, dense)
        if tomesd is not None:
            found["to_tomesd"] = ratio(row, tomesd)
    if row["keep_rate"] is not None:
        found["clustering"] = _per_step(row, "clustering")
    # Errors are compared at the steps that all rows run.
    steps = {call["step"] for call in row["calls"]}
    compared = {min(steps), (max(steps) + 1) // 2, max(steps)}
    for name in ("error", "attention_error"):
        errors = [100 * call[name] for call in row["calls"] if call["step"] in compared and name in call]
        if errors:
            found[name] = mean(errors)
    return found


def _per_step(row: Record, what: str) -> float:
    """Return the median; where steps differ in cost, the median over generations of their means."""
    return median(_by_turn(row, what, per_generation=row["keeps"]).values())


def ratio(row: Record, other: Record) -> float:
    """Return the median of the ratios within each step, or within each generation where steps differ in cost."""
    per_generation = row["keeps"] or other["keeps"]
    ours, theirs = (_by_turn(one, "seconds", per_generation) for one in (row, other))
    return median(ours[turn] / theirs[turn] for turn in ours if turn in theirs)


def _by_turn(row: Record, what: str, per_generation: bool) -> dict[tuple[int, ...], float]:
    if not per_generation:
        return {(call["repeat"], call["step"]): call[what] for call in row["calls"]}
    groups = groupby(row["calls"], key=lambda call: call["repeat"])
    return {(repeat,): mean(call[what] for call in calls) for repeat, calls in groups}


def body(record: Record) -> Table:
    return Table(list(_COLUMNS.values()), [[row.get(name) for name in _COLUMNS] for row in summaries(record)])


def table(record: Record) -> str:
    """Return text for a terminal."""
    lines = [*headlines(record), body(record).text(), *notes(record)]
    if busy := load_warning(record["machine"]):
        lines.append(busy)
    return "\n".join(lines)


def headlines(record: Record) -> tuple[str, str]:
    """Return what ran, and where."""
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
    """Return what could not run, how to read the errors, and whether the goal was met."""
    lines = [
        f"not run: {row['name']} at keep {row['keep_rate']:g}: {row['cannot']}"
        for row in record["rows"]
        if row["cannot"]
    ]
    found = summaries(record)
    without = next(row for row in found if row["name"] == WITHOUT)
    lines += [
        "The weights are random: times are those of the architecture, but tokens are not those of images, and which "
        "variant errs least depends on how evenly attention spreads.",
        f"Without what the merged self-attentions give at all, the prediction is {without['error']:.1f} % off: errors "
        "are to be read against that.",
    ]
    rows = [row for row in found if row["keep_rate"] == GOAL and "to_tomesd" in row and row["name"].startswith("atc")]
    for verdict, is_met in (("met by", True), ("missed by", False)):
        names = [f"{row['name']} ({row['to_tomesd']:.3f})" for row in rows if (row["to_tomesd"] <= 1) == is_met]
        if names:
            lines.append(f"goal of at most tomesd's time at keep {GOAL:g}: {verdict} {'; '.join(names)}")
    return lines
