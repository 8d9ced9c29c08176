"""agglo finetune"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agglo.cli.arguments import number

_DETAILS = """\
Train a classifier as a recipe says: dense, or with tokens reduced by any method from the first step on.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv, best/model.safetensors, last/model.safetensors and last/state.pt.
On several GPUs or machines: accelerate launch -m agglo finetune ..., or torchrun -m agglo finetune ...
"""

_EXAMPLES = """\
examples:
  agglo finetune --list
  agglo finetune deit --show --method atc --linkage average --keep-rate 0.5
  agglo finetune fashion_mnist --data fashion-mnist --output runs/fashion
  agglo finetune deit --model deit_small_patch16_224 --dataset imagenet --data imagenet --output runs/atc50 \\
      --method atc --linkage average --keep-rate 0.5 --set pretrained=true precision=bf16
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "finetune",
        help="train a classifier by a recipe, crash-safe, on any number of devices",
        description=_DETAILS,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="its name, or the path of a .toml file")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data set")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the run")
    look = parser.add_argument_group("look at recipes")
    look.add_argument("--list", action="store_true", help="the recipes there are")
    look.add_argument("--show", action="store_true", help="the settings that a run would have")
    choices = parser.add_argument_group("settings that recipes go by")
    choices.add_argument("--model", metavar="NAME", help="a timm model")
    choices.add_argument(
        "--dataset", metavar="NAME", help="imagenet, nabirds, coco, nuswide, folder, hf, fashion-mnist"
    )
    choices.add_argument("--method", metavar="M", help="atc, tome, evit, ...; none trains the dense model")
    choices.add_argument("--linkage", metavar="L", help="of atc: single, average, complete")
    choices.add_argument("--keep-rate", type=number, metavar="R", help="fraction of patch tokens kept at each stage")
    choices.add_argument("--checkpoint", metavar="F", help="starting weights")
    choices.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="any setting that --show lists"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification import recipes
    from agglo.classification.recipes import assignment

    if arguments.list:
        for name in recipes.names():
            print(f"{name:<16}{recipes.load(name).about}")
        return
    if arguments.recipe is None:
        raise ValueError(f"name a recipe: {', '.join(recipes.names())}, or a .toml file")
    settings, notes = recipes.load(arguments.recipe).resolve(
        {
            **{name: getattr(arguments, name) for name in _CHOICES if getattr(arguments, name) is not None},
            **dict(assignment(text) for text in arguments.set),
        }
    )
    if arguments.show:
        print(recipes.shown(settings, notes))
        return
    for option in ("data", "output"):
        if getattr(arguments, option) is None:
            raise ValueError(f"--{option} is missing: name a folder")
    from accelerate import PartialState

    from agglo.classification.training import finetune
    from agglo.demo import embedded  # noqa: F401 timm knows the embedded model from here on

    best = finetune(settings, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(f"best: {', '.join(f'{name} {value:.4g}' for name, value in best.items())}; {arguments.output / 'best'}")


_CHOICES = ("model", "dataset", "method", "linkage", "keep_rate", "checkpoint")
