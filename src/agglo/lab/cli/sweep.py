"""Run a recipe with every combination of some settings, each in a folder of its own, and rank them.

The same command goes on where an earlier one was stopped. sweep.json holds the ranking so far after every run.
Without --over, the combinations are those of the paper: warm-up of 5 or 20 epochs, the backbone at a hundredth of the
rate or all of it, frozen for 5 epochs or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agglo.lab.cli.finetune import ClassifierOptions
from agglo.lab.options import option
from agglo.lab.tasks.classification.training.settings import RECIPES
from agglo.lab.tasks.classification.training.sweep import PAPER, sweep, table
from agglo.lab.training.recipes import assignments

EXAMPLES = """\
examples:
  agglo sweep deit --data imagenet --output sweeps/atc25 --method atc --keep-rate 0.25
  agglo sweep fashion_mnist --data fashion-mnist --output sweeps/lr --over lr=5e-4,1e-3,2e-3 weight_decay=0,0.05
"""


@dataclass(frozen=True, kw_only=True)
class Options(ClassifierOptions):
    """What to try."""

    over: Sequence[str] = option([], "settings and the values to try", metavar="NAME=V,V")


def run(options: Options) -> None:
    recipe = RECIPES.load(options.recipe)
    data, output = options.folders()
    from accelerate import PartialState  # of the extra `train`

    over = dict(assignments(text) for text in options.over) or PAPER
    ranked = sweep(recipe, options.chosen(), over, data, output)
    if PartialState().is_main_process:
        print(table(ranked))
