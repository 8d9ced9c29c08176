"""All items with what they need, what that costs and what is done: for a terminal and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from agglo.lab.paper.estimates import (
    ASSUMPTION,
    MINIATURE_ASSUMPTION,
    MULTIPLY_ADDS_PER_SECOND,
    ON_TWO_CORES,
    in_words,
)
from agglo.lab.paper.output import open_journal
from agglo.lab.paper.registry import Benchmark
from agglo.lab.paper.study import Need, Settings, Study
from agglo.utils.tables import Column, Table

_FEW = 3  # weights that are listed by name


def listing(items: Iterable[Study], settings: Settings) -> str:
    """For a terminal. A minus stands before what is not here."""
    mini = settings.miniature
    per_second = ON_TWO_CORES if mini else MULTIPLY_ADDS_PER_SECOND
    columns = [Column("item", left=True), Column("in the paper", left=True), Column("hours" if mini else "GPU hours")]
    columns += [Column("done"), Column("needs (- is not here)", left=True)]
    rows = []
    for item in items:
        if not item.is_offered(settings.miniature):
            continue
        cells = item.cells(settings)
        hours = in_words(cells, per_second)
        rows.append([item.name, item.shows, hours, _done(item, settings), _needs(item, settings)])
    return f"{Table(columns, rows).text()}\n\n{MINIATURE_ASSUMPTION if mini else ASSUMPTION}."


def benchmarks(listed: Iterable[Benchmark], output: Path) -> str:
    """For a terminal: the commands, and when a results folder got what each measured last."""
    columns = [Column("benchmark", left=True), Column("measured", left=True), Column("what is timed", left=True)]
    rows = [[f"agglo bench {each.name}", _measured(output, each), each.about] for each in listed]
    return Table(columns, rows).text()


def benchmark_table(listed: Iterable[Benchmark]) -> str:
    """Markdown."""
    columns = [Column("benchmark", left=True), Column("what is timed", left=True)]
    return Table(columns, [[f"`agglo bench {each.name}`", each.about] for each in listed]).markdown()


def _measured(output: Path, benchmark: Benchmark) -> str:
    path = output / "bench" / f"{benchmark.name}.json"
    if not path.exists():
        return "not yet"
    return str(json.loads(path.read_text(encoding="utf-8"))["machine"]["date"][:10])


def table(items: Iterable[Study]) -> str:
    """Markdown, with nothing in it that depends on the machine: what items need, then what they measure."""
    columns = [Column("item", left=True), Column("in the paper", left=True), Column("cells"), Column("GPU hours")]
    columns += [Column("cells in miniature"), Column("needs", left=True)]
    work, words = [], []
    for item in items:
        in_full = item.is_offered(False)
        cells = item.cells(Settings()) if in_full else ()
        row = [str(len(cells)), in_words(cells)] if in_full else ["", ""]
        row.append(str(len(item.cells(Settings(miniature=True)))) if item.is_offered(True) else "")
        work.append([f"`{item.name}`", item.shows, *row, _named(item.needs(False)) if in_full else "nothing"])
        words.append([f"`{item.name}`", item.about, item.stands_in if item.is_offered(True) else "in full only"])
    told = [Column("item", left=True), Column("what is measured", left=True), Column("in miniature", left=True)]
    return f"{Table(columns, work).markdown()}\n\n{ASSUMPTION}.\n\n{Table(told, words).markdown()}"


def _named(needs: Sequence[Need]) -> str:
    """By their names; many weights by their number."""
    weights = [need.name for need in needs if need.kind == "weights"]
    names = [need.name for need in needs if need.kind != "weights"]
    names += weights if len(weights) <= _FEW else [f"{len(weights)} files of weights"]
    return ", ".join(names) or "nothing"


def done_table(items: Iterable[Study], output: Path) -> str:
    """Markdown: how many cells of each item a results folder holds, of those that there are."""
    rows = []
    for item in items:
        counts = [_done(item, Settings(miniature=miniature, output=output)) for miniature in (False, True)]
        rows.append([f"`{item.name}`", *counts])
    columns = [Column("item", left=True), Column("cells done"), Column("in miniature")]
    return Table(columns, rows).markdown()


def _needs(item: Study, settings: Settings) -> str:
    """Names, and of many weights how many of them are here."""
    needs = item.needs(settings.miniature)
    weights = [need for need in needs if need.kind == "weights"]
    words = [_with_sign(need, settings) for need in needs if need.kind != "weights" or len(weights) <= _FEW]
    if len(weights) > _FEW:
        here = sum(need.is_here(settings) for need in weights)
        words.append(f"{here} of {len(weights)} weights")
    return " ".join(words) or "nothing"


def _with_sign(need: Need, settings: Settings) -> str:
    return need.name if need.is_here(settings) else f"-{need.name}"


def _done(item: Study, settings: Settings) -> str:
    if not item.is_offered(settings.miniature):
        return ""
    cells = item.cells(settings)
    journal = open_journal(item, settings)
    return f"{sum(cell.about in journal for cell in cells)}/{len(cells)}" if cells else "-"
