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

from agglo.lab.options import AtLeastOne, device_or_best, matching, option
from agglo.lab.paper.output import read_results, write_output
from agglo.lab.paper.paths import find
from agglo.lab.paper.registry import GPU_HOURS, benchmarks, item_named, items, overview
from agglo.lab.paper.runner import run as run_item
from agglo.lab.paper.runner import runnable_cells
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
    redraw: bool = option(False, "measure nothing; write tables and figures anew")


def run(options: Options) -> None:
    chosen = None if options.item in (None, "all") else item_named(str(options.item))
    run_items(options, list(items().values()), chosen)
    if options.item is None:
        print(f"\n{benchmarks(options.output).text()}")


def run_items(options: Options, items: Sequence[Study], one: Study | None) -> None:
    """List items, or measure one of them or all."""
    mini = options.miniature
    chosen = [item for item in (items if one is None else [one]) if item.is_offered(mini)]
    if one is not None and not chosen:
        raise ValueError(f"item={options.item!r} is there {'without' if mini else 'with'} --miniature only")
    is_measured = not (options.item is None or mini or options.redraw)
    found = {
        "data": find("data", options.data, chosen, mini),
        "weights": find("weights", options.weights, chosen, mini),
        "device": device_or_best(options.device) if is_measured else "cpu",
    }
    settings = Settings(**{**matching(Settings, options), **found})
    if options.item is None:
        print(f"{overview(chosen, options.output, settings).text()}\n\n{GPU_HOURS}")
        return
    for item in chosen:
        if len(chosen) > 1 and item.cells(settings) and not runnable_cells(item, settings):
            print(f"agglo: {item.name}: nothing that it needs is here", file=sys.stderr)
            continue
        folder = settings.folder(item.name)
        left_out = [] if options.redraw else list(run_item(item, settings).left_out)
        if options.redraw:
            write_output(item, read_results(folder), settings)
        if os.environ.get("RANK", "0") == "0":
            print((folder / "tables.md").read_text(encoding="utf-8"))
            absent = [need.name for cell in left_out for need in cell.needs if not need.is_available(settings)]
            if absent:
                names = ", ".join(dict.fromkeys(absent))
                print(f"{len(left_out)} cells left out; they need what is not here: {names}")
            print(f"{folder}: record.json, tables.md, tables.tex")
