"""All items with what they need, what that costs and what is done: for a terminal and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agglo.lab.paper.output import open_journal
from agglo.lab.paper.registry import Benchmark
from agglo.lab.paper.study import Settings, Study
from agglo.utils.tables import Column, Table

GPU_HOURS = (
    "GPU hours: multiply-adds of all passes at 10 x 10^12 per second on one GPU; a training step counts as three "
    "passes, and the reduction itself as nothing."
)
_FEW = 3  # weights that are listed by name


def listing(items: Iterable[Study], settings: Settings) -> str:
    """Return the list for a terminal. A minus stands before what is absent."""
    columns = [Column("item", left=True), Column("in the paper", left=True), Column("GPU hours"), Column("done")]
    rows = []
    for item in items:
        if item.is_offered(settings.miniature):
            hours = "" if settings.miniature else item.gpu_hours
            rows.append([item.name, item.shows, hours, _done(item, settings), _needs(item, settings)])
    table = Table([*columns, Column("needs (- is not here)", left=True)], rows).text()
    return table if settings.miniature else f"{table}\n\n{GPU_HOURS}"


def benchmarks(listed: Iterable[Benchmark], output: Path) -> str:
    """Return, for a terminal, the commands, and when a results folder got what each measured last."""
    columns = [Column("benchmark", left=True), Column("measured", left=True), Column("what is timed", left=True)]
    rows = []
    for each in listed:
        path = output / "bench" / f"{each.name}.json"
        date = json.loads(path.read_text(encoding="utf-8"))["machine"]["date"][:10] if path.exists() else "not yet"
        rows.append([f"agglo bench {each.name}", date, each.about])
    return Table(columns, rows).text()


def table(items: Iterable[Study], output: Path) -> str:
    """Return Markdown: what items need and how many of their cells a results folder holds, then what they measure."""
    columns = [Column("item", left=True), Column("in the paper", left=True), Column("cells done"), Column("GPU hours")]
    columns += [Column("in miniature"), Column("needs", left=True)]
    work, described = [], []
    for item in items:
        done, small = (_done(item, Settings(miniature=miniature, output=output)) for miniature in (False, True))
        work.append([f"`{item.name}`", item.shows, done, item.gpu_hours if done else "", small, _needs(item)])
        described.append([f"`{item.name}`", item.about, item.stands_in if small else "in full only"])
    titles = ("item", "what is measured", "in miniature")
    text = Table([Column(title, left=True) for title in titles], described).markdown()
    return f"{Table(columns, work).markdown()}\n\n{GPU_HOURS}\n\n{text}"


def _needs(item: Study, settings: Settings | None = None) -> str:
    """Return names, and the number of many weights; with settings, a minus before what is absent."""
    needs = item.needs(settings is not None and settings.miniature)
    weights = [need for need in needs if need.kind == "weights"]
    named = [need for need in needs if need.kind != "weights" or len(weights) <= _FEW]
    if settings is None:
        parts = [need.name for need in named]
        parts += [f"{len(weights)} files of weights"] if len(weights) > _FEW else []
        return ", ".join(parts) or "nothing"
    parts = [f"{'' if need.is_available(settings) else '-'}{need.name}" for need in named]
    if len(weights) > _FEW:
        parts.append(f"{sum(need.is_available(settings) for need in weights)} of {len(weights)} weights")
    return " ".join(parts) or "nothing"


def _done(item: Study, settings: Settings) -> str:
    """Return how many cells are done; a hyphen for an item that follows from others."""
    if not item.is_offered(settings.miniature):
        return ""
    cells, journal = item.cells(settings), open_journal(item, settings)
    return f"{sum(cell.about in journal for cell in cells)}/{len(cells)}" if cells else "-"
