"""Measure the tables and figures of the ATC paper, beside the numbers that it prints.

Without ITEM: all tables and figures of the paper, with what each needs, whether that is here, how many GPU hours it is
and how much of it is done; then the benchmarks, which `agglo bench` runs. With ITEM: measure it. Every cell is kept
when it is done, so that the same command goes on where an earlier one was stopped; cells whose data or weights are not
here are left out. DIR/ITEM then holds record.json, tables.md, tables.tex and the figure.

--miniature runs the same item on the models and images that come with agglo, in minutes to hours on two cores.
On several GPUs or machines: accelerate launch -m agglo reproduce ..., or torchrun -m agglo reproduce ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.lab.options import AtLeastOne, device_or_best, option
from agglo.lab.paper.listing import benchmarks, listing
from agglo.lab.paper.output import read_results, write_output
from agglo.lab.paper.places import data_places, weight_places
from agglo.lab.paper.registry import BENCHMARKS, item_named, items
from agglo.lab.paper.runner import is_runnable
from agglo.lab.paper.runner import run as run_item
from agglo.lab.paper.study import Settings, Study

EXAMPLES = """\
examples:
  agglo reproduce
  agglo reproduce --miniature
  agglo reproduce off-the-shelf --miniature
  agglo reproduce off-the-shelf --data imagenet=/data/imagenet --weights checkpoints/
  accelerate launch --num_processes 8 -m agglo reproduce fine-tuned --data /data --weights checkpoints/
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may choose, for items of the paper and for studies alike."""

    item: str | None = option(None, "one of the list, or all", positional=True, metavar="ITEM")
    miniature: bool = option(False, "smaller, with what comes with agglo")
    data: Sequence[str] = option(
        [], "folder of a data set, or a folder of folders with their names", metavar="[NAME=]DIR"
    )
    weights: Sequence[str] = option([], "file of weights, or a folder of files with their names", metavar="[NAME=]F")
    output: Path = option(Path("results"), "of all items", metavar="DIR")
    runs: Path = option(Path("runs/reproduce"), "what training writes", metavar="DIR")
    seeds: AtLeastOne | None = option(None, "where chance has a part (default: the item's own)")
    batch_size: AtLeastOne | None = option(None, "(default: the item's own)")
    device: str | None = option(None, "cpu, cuda, cuda:1, mps, xpu (default: the best one there is)", metavar="D")
    released: bool = option(
        False,
        "train also as the released code behaves, where that differs from the paper (mae: t - 1 tokens per block)",
    )
    redraw: bool = option(False, "measure nothing; write tables and figures anew")


def run(options: Options) -> None:
    chosen = None if options.item in (None, "all") else item_named(str(options.item))
    run_items(options, list(items().values()), chosen)
    if options.item is None:
        print(f"\n{benchmarks(BENCHMARKS, options.output)}")


def run_items(options: Options, items: Sequence[Study], one: Study | None) -> None:
    """List items, or measure one of them or all."""
    mini = options.miniature
    chosen = [item for item in items if item.is_offered(mini)]
    if one is not None:
        chosen = [one]
        if not one.is_offered(mini):
            raise ValueError(f"item={options.item!r} is there {'without' if mini else 'with'} --miniature only")
    is_measured = not (options.item is None or mini or options.redraw)
    settings = Settings(
        miniature=mini,
        data=data_places(options.data, chosen, miniature=mini),
        weights=weight_places(options.weights, chosen, miniature=mini),
        output=options.output,
        runs=options.runs,
        seeds=options.seeds,
        batch_size=options.batch_size,
        released=options.released,
        device=device_or_best(options.device) if is_measured else "cpu",
    )
    if options.item is None:
        print(listing(chosen, settings))
        return
    for item in chosen:
        if len(chosen) == 1 or is_runnable(item, settings):
            _run(item, settings, redraw=options.redraw)
        else:
            print(f"agglo: {item.name}: nothing that it needs is here", file=sys.stderr)


def _run(item: Any, settings: Any, *, redraw: bool) -> None:
    folder = settings.folder(item.name)
    left_out: Sequence[Any] = ()
    if redraw:
        write_output(item, read_results(folder), settings)
    else:
        left_out = run_item(item, settings).left_out
    if os.environ.get("RANK", "0") == "0":
        print((folder / "tables.md").read_text(encoding="utf-8"))
        if left_out:
            needs = [need for cell in left_out for need in cell.needs]
            absent = dict.fromkeys(need.name for need in needs if not need.is_here(settings))
            print(f"{len(left_out)} cells left out; they need what is not here: {', '.join(absent)}")
        print(f"{folder}: record.json, tables.md, tables.tex")
