"""Options and run of the commands that train by a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agglo.lab.options import FLOPS_HELP, IMPORT_HELP, SCHEDULE_HELP, option
from agglo.lab.training.recipes import assignment, shown
from agglo.text import parse_call
from agglo.utils.tables import Column, Table

_CHOICES = ("model", "dataset", "method", "linkage", "keep_rate", "flops", "threshold", "schedule", "checkpoint")
SETTINGS = "settings that recipes go by"


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of a command that trains by a recipe, or shows it. Commands add what models there are."""

    GROUP: ClassVar = SETTINGS

    recipe: str | None = option(
        None, "its name, or the path of a .toml file", positional=True, metavar="RECIPE", group=None
    )
    data: Path | None = option(None, "folder of the data set", metavar="DIR", group=None)
    output: Path | None = option(None, "folder of the run", metavar="DIR", group=None)
    model: str | None = None
    dataset: str | None = None
    method: str | None = option(None, "atc, tome, evit, ...; none trains the dense model", metavar="M")
    linkage: str | None = option(None, "of atc: single, average, complete", metavar="L")
    keep_rate: float | None = option(None, "fraction of patch tokens kept at each stage", metavar="R")
    flops: float | None = option(None, f"instead: {FLOPS_HELP}", metavar="F")
    threshold: float | None = option(None, "instead: merge groups up to this distance", metavar="D")
    schedule: str | None = option(None, f"instead: {SCHEDULE_HELP}", metavar="S")
    imports: Sequence[str] = option([], IMPORT_HELP, flags=("--import",), metavar="MODULE", nargs=None, action="append")
    checkpoint: str | None = None
    set: Sequence[str] = option([], "any setting that RECIPE --show lists", metavar="NAME=VALUE")
    list: bool = option(False, "the recipes there are", group="look at recipes")
    show: bool = option(False, "the settings that a run would have, and what they mean", group="look at recipes")

    def chosen(self) -> dict[str, Any]:
        """Return the settings that were typed."""
        typed = {name: getattr(self, name) for name in _CHOICES if getattr(self, name, None) is not None}
        if ":" in typed.get("method", ""):
            typed["method"], _, options = parse_call(typed["method"])
            if linkage := options.pop("linkage", None):
                typed.setdefault("linkage", linkage)
            typed["method_options"] = options
        return {**typed, **dict(assignment(text) for text in self.set)}

    def run(self, recipes: Any, train: Callable[[Any, Path, Path], dict[str, Any]]) -> None:
        """List the recipes of a task, show one, or train by it.

        `train` takes settings, data and the folder of the run, and returns the best row of the log.
        """
        if self.list:
            rows = [[name, recipes.load(name).about] for name in recipes.names()]
            print(Table([Column("recipe", left=True), Column("about", left=True)], rows).text())
            return
        if self.recipe is None:
            raise ValueError(f"name a recipe: {', '.join(recipes.names())}, or a .toml file")
        settings, notes = recipes.load(self.recipe).resolve(self.chosen())
        if self.show:
            print(shown(settings, notes))
            return
        if self.data is None or self.output is None:
            raise ValueError(f"--{'data' if self.data is None else 'output'} is missing: name a folder")
        if os.environ.get("RANK", "0") == "0":
            for note in notes:
                print(f"agglo: {note}", file=sys.stderr)
        tell_best(train(settings, self.data, self.output), self.output)


def tell_best(best: Mapping[str, Any], output: Path) -> None:
    """Print the best row of a run's log; of several processes only the first does."""
    from accelerate import PartialState  # of the extra `train`

    if PartialState().is_main_process:
        print(f"best: {', '.join(f'{name} {value:.4g}' for name, value in best.items())}; {output / 'best'}")
