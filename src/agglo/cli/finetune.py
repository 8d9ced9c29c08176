"""agglo finetune, agglo sweep"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agglo.classification.data import dataset_names
from agglo.cli.arguments import MODEL_HELP, add_command
from agglo.cli.training import add_choices, add_folders, add_look, chosen, require_folders, run_by_recipe

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
  agglo finetune deit --model hf:my-vit --dataset folder --data birds --output runs/birds --set drop_path=0 \\
      --method atc --keep-rate 0.5
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


def _settings() -> dict[str, str]:
    """What some settings accept: asked anew each time, since users may have added data sets."""
    return {
        "model": MODEL_HELP,
        "dataset": ", ".join(dataset_names()),
        "skip_bad": "leave out missing and unreadable images and count them",
        "checkpoint": "starting weights; a head of other classes is replaced",
    }


def add_to(commands: Any) -> None:
    parser = add_command(commands, "finetune", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="its name, or the path of a .toml file")
    add_folders(parser, output="folder of the run")
    add_look(parser)
    add_choices(parser, "agglo finetune", **_settings())
    parser.set_defaults(run=run)
    _add_sweep(commands)


def _add_sweep(commands: Any) -> None:
    parser = add_command(commands, "sweep", about=_ABOUT_SWEEP, details=_SWEEP, examples=_SWEEP_EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, or the path of a .toml file")
    add_folders(parser, output="folder of the sweep")
    parser.add_argument(
        "--over", nargs="+", action="extend", default=[], metavar="NAME=V,V", help="settings and the values to try"
    )
    add_choices(parser, "agglo finetune", **_settings())
    parser.set_defaults(run=run_sweep)


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification.training.recipe import RECIPES

    run_by_recipe(arguments, RECIPES, _train)


def _train(settings: Any, data: Path, output: Path) -> dict[str, Any]:
    from agglo.classification.training.trainer import finetune

    return finetune(settings, data, output)


def run_sweep(arguments: argparse.Namespace) -> None:
    from agglo.classification.training import recipe as recipes
    from agglo.experiments.training.recipes import assignments

    recipe = recipes.load(arguments.recipe)
    require_folders(arguments)
    from accelerate import PartialState

    from agglo.classification.training.sweep import PAPER, sweep, table

    over = dict(assignments(text) for text in arguments.over) or PAPER
    ranked = sweep(recipe, chosen(arguments), over, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(table(ranked))
