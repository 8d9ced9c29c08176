"""What commands that train by a recipe share: their arguments, and how they run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agglo.cli.arguments import SCHEDULE_HELP, add_import, number
from agglo.experiments.tables import Column, Table

_CHOICES = ("model", "dataset", "skip_bad", "method", "linkage", "keep_rate", "threshold", "schedule", "checkpoint")


def add_folders(parser: argparse.ArgumentParser, *, data: str = "folder of the data set", output: str) -> None:
    """--data, --output."""
    parser.add_argument("--data", type=Path, metavar="DIR", help=data)
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)


def add_look(parser: argparse.ArgumentParser) -> None:
    """--list, --show."""
    look = parser.add_argument_group("look at recipes")
    look.add_argument("--list", action="store_true", help="the recipes there are")
    look.add_argument("--show", action="store_true", help="the settings that a run would have, and what they mean")


def add_choices(
    parser: argparse.ArgumentParser, command: str, *, model: str, dataset: str, skip_bad: str, checkpoint: str
) -> None:
    """The settings that recipes go by, and --set for all others.

    command: whose --show lists them. The others say what a person may type.
    """
    choices = parser.add_argument_group("settings that recipes go by")
    choices.add_argument("--model", metavar="NAME", help=model)
    choices.add_argument("--dataset", metavar="NAME", help=dataset)
    choices.add_argument("--skip-bad", action="store_const", const=True, help=skip_bad)
    choices.add_argument("--method", metavar="M", help="atc, tome, evit, ...; none trains the dense model")
    choices.add_argument("--linkage", metavar="L", help="of atc: single, average, complete")
    choices.add_argument("--keep-rate", type=number, metavar="R", help="fraction of patch tokens kept at each stage")
    choices.add_argument("--threshold", type=number, metavar="D", help="instead: merge groups up to this distance")
    choices.add_argument("--schedule", metavar="S", help=f"instead: {SCHEDULE_HELP}")
    add_import(choices)
    choices.add_argument("--checkpoint", metavar="F", help=checkpoint)
    choices.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help=f"any setting that `{command} RECIPE --show` lists",
    )


def chosen(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were typed."""
    from agglo.experiments.training.recipes import assignment
    from agglo.methods import split_method_text

    typed = {name: getattr(arguments, name) for name in _CHOICES if getattr(arguments, name) is not None}
    if ":" in typed.get("method", ""):
        typed["method"], options = split_method_text(typed["method"])
        if isinstance(options.get("linkage"), list):  # one per reduction, which the setting has no place for
            typed.setdefault("linkage", "none")
        elif linkage := options.pop("linkage", None):
            typed.setdefault("linkage", linkage)
        typed["method_options"] = options
    return {**typed, **dict(assignment(text) for text in arguments.set)}


def require_folders(arguments: argparse.Namespace) -> None:
    for option in ("data", "output"):
        if getattr(arguments, option) is None:
            raise ValueError(f"--{option} is missing: name a folder")


def run_by_recipe(
    arguments: argparse.Namespace, recipes: Any, train: Callable[[Any, Path, Path], dict[str, Any]]
) -> None:
    """List the recipes, show one, or train by it.

    recipes: of the task. train: given settings, data and the folder of the run, trains and returns its best row.
    """
    from agglo.experiments.training.recipes import shown

    if arguments.list:
        rows = [[name, recipes.load(name).about] for name in recipes.names()]
        print(Table([Column("recipe", left=True), Column("about", left=True)], rows).text())
        return
    if arguments.recipe is None:
        raise ValueError(f"name a recipe: {', '.join(recipes.names())}, or a .toml file")
    settings, notes = recipes.load(arguments.recipe).resolve(chosen(arguments))
    if arguments.show:
        print(shown(settings, notes))
        return
    require_folders(arguments)
    from accelerate import PartialState

    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"agglo: {note}", file=sys.stderr)
    best = train(settings, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(f"best: {', '.join(f'{name} {value:.4g}' for name, value in best.items())}; {arguments.output / 'best'}")
