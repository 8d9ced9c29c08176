"""agglo finetune, agglo sweep"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from agglo.classification.data import dataset_names
from agglo.cli.arguments import SCHEDULE_HELP, add_command, add_import, number
from agglo.experiments.tables import Column, Table

_ABOUT = "train a classifier by a recipe, crash-safe, on any number of devices"
_ABOUT_SWEEP = "train with every combination of some settings, and rank them"

_DETAILS = """\
Train a classifier as a recipe says: dense, or with tokens reduced by any method from the first step on.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv, best/model.safetensors, last/model.safetensors, last/state.pt (to go on from),
and result.json once the run is done.
On several GPUs or machines: accelerate launch -m agglo finetune ..., or torchrun -m agglo finetune ...
"""

_EXAMPLES = """\
examples:
  agglo finetune --list
  agglo finetune deit --show --method atc --linkage average --keep-rate 0.5
  agglo finetune fashion_mnist --data fashion-mnist --output runs/fashion
  agglo finetune deit --model deit_small_patch16_224 --dataset imagenet --data imagenet --output runs/atc50 \\
      --method atc --linkage average --keep-rate 0.5
  accelerate launch --num_processes 8 -m agglo finetune mae --checkpoint mae_pretrain_vit_base.pth \\
      --data imagenet --output runs/mae --set linkage=complete tracker=tensorboard
"""

_SWEEP = """\
Run a recipe with every combination of some settings, each in a folder of its own, and rank them.

The same command goes on where an earlier one was stopped. sweep.json holds the ranking so far after every run.
Without --over, the combinations are those of the paper: warm-up of 5 or 20 epochs, the backbone at a hundredth of the
rate or all of it, frozen for 5 epochs or not at all.
"""

_SWEEP_EXAMPLES = """\
examples:
  agglo sweep deit --data imagenet --output sweeps/atc25 --method atc --keep-rate 0.25
  agglo sweep fashion_mnist --data fashion-mnist --output sweeps/lr --over lr=5e-4,1e-3,2e-3 weight_decay=0,0.05
"""

_CHOICES = ("model", "dataset", "skip_bad", "method", "linkage", "keep_rate", "threshold", "schedule", "checkpoint")


def add_to(commands: Any) -> None:
    parser = add_command(commands, "finetune", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="its name, or the path of a .toml file")
    _add_folders(parser, "folder of the run")
    look = parser.add_argument_group("look at recipes")
    look.add_argument("--list", action="store_true", help="the recipes there are")
    look.add_argument("--show", action="store_true", help="the settings that a run would have, and what they mean")
    _add_choices(parser)
    parser.set_defaults(run=run)
    _add_sweep(commands)


def _add_sweep(commands: Any) -> None:
    parser = add_command(commands, "sweep", about=_ABOUT_SWEEP, details=_SWEEP, examples=_SWEEP_EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, or the path of a .toml file")
    _add_folders(parser, "folder of the sweep")
    parser.add_argument(
        "--over", nargs="+", action="extend", default=[], metavar="NAME=V,V", help="settings and the values to try"
    )
    _add_choices(parser)
    parser.set_defaults(run=run_sweep)


def _add_folders(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data set")
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_argument_group("settings that recipes go by")
    choices.add_argument("--model", metavar="NAME", help="a timm model")
    choices.add_argument("--dataset", metavar="NAME", help=", ".join(dataset_names()))
    choices.add_argument(
        "--skip-bad", action="store_const", const=True, help="leave out missing and unreadable images and count them"
    )
    choices.add_argument("--method", metavar="M", help="atc, tome, evit, ...; none trains the dense model")
    choices.add_argument("--linkage", metavar="L", help="of atc: single, average, complete")
    choices.add_argument("--keep-rate", type=number, metavar="R", help="fraction of patch tokens kept at each stage")
    choices.add_argument("--threshold", type=number, metavar="D", help="instead: merge groups up to this distance")
    choices.add_argument("--schedule", metavar="S", help=f"instead: {SCHEDULE_HELP}")
    add_import(choices)
    choices.add_argument("--checkpoint", metavar="F", help="starting weights; a head of other classes is replaced")
    choices.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any setting that `agglo finetune RECIPE --show` lists",
    )


def _chosen(arguments: argparse.Namespace) -> dict[str, Any]:
    from agglo.classification.training.recipe import assignment
    from agglo.methods import split_method_text

    typed = {name: getattr(arguments, name) for name in _CHOICES if getattr(arguments, name) is not None}
    if ":" in typed.get("method", ""):
        typed["method"], options = split_method_text(typed["method"])
        if linkage := options.pop("linkage", None):
            typed.setdefault("linkage", linkage)
        typed["method_options"] = options
    return {**typed, **dict(assignment(text) for text in arguments.set)}


def _require_folders(arguments: argparse.Namespace) -> None:
    for option in ("data", "output"):
        if getattr(arguments, option) is None:
            raise ValueError(f"--{option} is missing: name a folder")


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification.training import recipe as recipes

    if arguments.list:
        rows = [[name, recipes.load(name).about] for name in recipes.names()]
        print(Table([Column("recipe", left=True), Column("about", left=True)], rows).text())
        return
    if arguments.recipe is None:
        raise ValueError(f"name a recipe: {', '.join(recipes.names())}, or a .toml file")
    settings, notes = recipes.load(arguments.recipe).resolve(_chosen(arguments))
    if arguments.show:
        print(recipes.shown(settings, notes))
        return
    _require_folders(arguments)
    from accelerate import PartialState

    from agglo.classification.training.trainer import finetune

    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"agglo: {note}", file=sys.stderr)
    best = finetune(settings, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(f"best: {', '.join(f'{name} {value:.4g}' for name, value in best.items())}; {arguments.output / 'best'}")


def run_sweep(arguments: argparse.Namespace) -> None:
    from agglo.classification.training import recipe as recipes

    recipe = recipes.load(arguments.recipe)
    _require_folders(arguments)
    from accelerate import PartialState

    from agglo.classification.training.sweep import PAPER, sweep, table

    over = dict(recipes.assignments(text) for text in arguments.over) or PAPER
    ranked = sweep(recipe, _chosen(arguments), over, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(table(ranked))
