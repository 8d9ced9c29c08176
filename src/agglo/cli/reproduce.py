"""agglo reproduce"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_command, device, positive

_ABOUT = "the tables and figures of the ATC paper, measured beside printed"

_DETAILS = """\
Without ITEM: all tables and figures of the paper, with what each needs, whether that is here, how many GPU hours it is
and how much of it is done; then the benchmarks, which `agglo bench` runs. With ITEM: measure it. Every cell is kept
when it is done, so that the same command goes on where an earlier one was stopped; cells whose data or weights are not
here are left out. DIR/ITEM then holds record.json, tables.md, tables.tex and the figure.

--miniature runs the same item on the models and images that come with agglo, in minutes to hours on two cores.
On several GPUs or machines: accelerate launch -m agglo reproduce ..., or torchrun -m agglo reproduce ...
"""

_EXAMPLES = """\
examples:
  agglo reproduce
  agglo reproduce --miniature
  agglo reproduce off-the-shelf --miniature
  agglo reproduce off-the-shelf --data imagenet=/data/imagenet --weights checkpoints/
  accelerate launch --num_processes 8 -m agglo reproduce fine-tuned --data /data --weights checkpoints/
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "reproduce", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("item", nargs="?", metavar="ITEM", help="one of the list, or all")
    parser.add_argument("--miniature", action="store_true", help="smaller, with what comes with agglo")
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="[NAME=]DIR",
        help="folder of a data set, or a folder of folders with their names",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        action="extend",
        default=[],
        metavar="[NAME=]F",
        help="file of weights, or a folder of files with their names",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR", help="of all items (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/reproduce"),
        metavar="DIR",
        help="what training writes (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="where chance has a part (default: the item's own)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="(default: the item's own)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: the best one there is)")
    parser.add_argument(
        "--released",
        action="store_true",
        help="train also as the released code behaves, where that differs from the paper (mae: t - 1 tokens per block)",
    )
    parser.add_argument("--redraw", action="store_true", help="measure nothing; write tables and figures anew")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.reproduce.item import Settings
    from agglo.reproduce.listing import benchmarks, listing
    from agglo.reproduce.places import data_places, weight_places
    from agglo.reproduce.registry import BENCHMARKS, item_named, items
    from agglo.reproduce.runner import is_runnable

    mini = arguments.miniature
    chosen: Sequence[Any] = [item for item in items().values() if item.is_offered(mini)]
    if arguments.item not in (None, "all"):
        chosen = [item_named(arguments.item)]
        if not chosen[0].is_offered(mini):
            raise ValueError(f"item={arguments.item!r} is there {'without' if mini else 'with'} --miniature only")
    settings = Settings(
        miniature=mini,
        data=data_places(arguments.data, chosen, miniature=mini),
        weights=weight_places(arguments.weights, chosen, miniature=mini),
        output=arguments.output,
        runs=arguments.runs,
        seeds=arguments.seeds,
        batch_size=arguments.batch_size,
        released=arguments.released,
        device="cpu" if arguments.item is None or mini or arguments.redraw else device(arguments),
    )
    if arguments.item is None:
        print(f"{listing(chosen, settings)}\n\n{benchmarks(BENCHMARKS, arguments.output)}")
        return
    for item in chosen:
        if len(chosen) == 1 or is_runnable(item, settings):
            _run(item, settings, redraw=arguments.redraw)
        else:
            print(f"agglo: {item.name}: nothing that it needs is here", file=sys.stderr)


def _run(item: Any, settings: Any, *, redraw: bool) -> None:
    from agglo.reproduce.output import write_output
    from agglo.reproduce.record import read_results
    from agglo.reproduce.runner import run as run_item

    folder = settings.folder(item.name)
    left_out: Sequence[Any] = ()
    if redraw:
        write_output(item, read_results(folder), settings)
    else:
        left_out = run_item(item, settings).left_out
    if os.environ.get("RANK", "0") == "0":
        print((folder / "tables.md").read_text(encoding="utf-8"))
        if left_out:
            here = {need.name for need in item.needs(settings.miniature) if need.is_here(settings)}
            absent = dict.fromkeys(name for cell in left_out for name in cell.needs if name not in here)
            print(f"{len(left_out)} cells left out; they need what is not here: {', '.join(absent)}")
        print(f"{folder}: record.json, tables.md, tables.tex")
