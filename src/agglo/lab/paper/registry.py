"""All that can be measured: items, in the order of the paper, and benchmarks; with lists of them.

An item has cells, a record and tables that lie in results/: `agglo reproduce ITEM`. A new one is listed in its module's
ITEMS, and the module here. A benchmark times what a person chooses, here and now: `agglo bench NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from agglo.checks import choice
from agglo.lab.paper.output import open_journal
from agglo.lab.paper.study import Settings, Study
from agglo.utils.tables import Column, Table

MODULES: tuple[str, ...] = (
    *("fine_tuned", "ranking", "off_the_shelf", "per_block"),
    *("diffusion", "detection", "clusters", "throughput"),
)
GPU_HOURS = (
    "GPU hours: multiply-adds of all passes at 10 x 10^12 per second on one GPU; a training step counts as three "
    "passes, and the reduction itself as nothing."
)
_FEW = 3  # weights that are listed by name


BENCHMARKS = {  # modules of the room `bench`
    "model": "images per second: dense, ToMe, ATC, and the ceiling where reduction is free",
    "diffusion": "a step of Stable Diffusion 1.5: dense, tomesd, and agglo's options",
    "vlm": "a vision-language model's time to its first token, with all and fewer image tokens",
    "clustering": "the clustering alone against scikit-learn, SciPy and fastcluster",
    "methods": "one reduction stage of every method without parameters, against ToMe",
    "adapter": "a detector's backbone part by part: dense, and reduced at several keep rates",
}


@cache
def items() -> dict[str, Study]:
    """Return all items by name."""
    found = [item for module in MODULES for item in import_module(f"agglo.lab.paper.items.{module}").ITEMS]
    return {item.name: item for item in found}


def item_named(name: str) -> Study:
    if name in BENCHMARKS:
        raise ValueError(f"item={name!r} is a benchmark: agglo bench {name}")
    return items()[choice("item", name, items())]


def overview(items: Iterable[Study], output: Path, settings: Settings | None = None) -> Table:
    """Return what items need, and how many of their cells a results folder holds, in full and in miniature.

    With settings, a minus stands before the needs that are not here.
    """
    columns = [Column("item", left=True), Column("in the paper", left=True), Column("cells done"), Column("GPU hours")]
    columns += [Column("in miniature"), Column("needs" if settings is None else "needs (- is not here)", left=True)]
    rows = []
    for item in items:
        done, small = (_done(item, Settings(miniature=miniature, output=output)) for miniature in (False, True))
        name = f"`{item.name}`" if settings is None else item.name
        rows.append([name, item.shows, done, item.gpu_hours if done else "", small, _needs(item, settings)])
    return Table(columns, rows)


def described(items: Iterable[Study]) -> Table:
    """Return what items measure, and what stands in for what in miniature."""
    titles = ("item", "what is measured", "in miniature")
    rows = [[f"`{i.name}`", i.about, i.stands_in if i.is_offered(True) else "in full only"] for i in items]
    return Table([Column(title, left=True) for title in titles], rows)


def benchmarks(output: Path) -> Table:
    """Return the commands of benchmarks, and when a results folder got what each measured last."""
    rows = []
    for name, about in BENCHMARKS.items():
        path = output / "bench" / f"{name}.json"
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ran = [run["machine"]["date"][:10] for run in content.get("runs", [content]) if run]
        rows.append([f"agglo bench {name}", max(ran, default="not yet"), about])
    return Table([Column(title, left=True) for title in ("benchmark", "measured", "what is timed")], rows)


def _needs(item: Study, settings: Settings | None) -> str:
    """Return names, and the number of many weights; with settings, a minus before what is absent."""
    needs = item.needs(settings is not None and settings.miniature)
    weights = [need for need in needs if need.kind == "weights"]
    absent = [] if settings is None else [need for need in needs if not need.is_available(settings)]
    named = [need for need in needs if need.kind != "weights" or len(weights) <= _FEW]
    parts = [f"{'-' * (need in absent)}{need.name}" for need in named]
    if len(weights) > _FEW:
        here = "" if settings is None else f"{len([need for need in weights if need not in absent])} of "
        parts.append(f"{here}{len(weights)} files of weights")
    return ", ".join(parts) or "nothing"


def _done(item: Study, settings: Settings) -> str:
    """Return how many cells are done; a hyphen for an item that follows from others."""
    if not item.is_offered(settings.miniature):
        return ""
    cells, journal = item.cells(settings), open_journal(item, settings)
    return f"{sum(cell.about in journal for cell in cells)}/{len(cells)}" if cells else "-"
