"""Train a classifier as a recipe says: dense, or with tokens reduced by any method from the first step on.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv, best/model.safetensors, last/model.safetensors, last/state.pt (to go on from),
and result.json once the run is done.
On several GPUs or machines: accelerate launch -m agglo finetune ..., or torchrun -m agglo finetune ...
"""

from __future__ import annotations

from dataclasses import dataclass

from agglo.lab.cli.training import SETTINGS, RecipeOptions
from agglo.lab.options import ModelOptions, option
from agglo.lab.tasks.classification.data import dataset_names
from agglo.lab.tasks.classification.training.settings import RECIPES
from agglo.lab.tasks.classification.training.trainer import finetune

EXAMPLES = """\
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


@dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """What to train."""

    model: str | None = option(None, ModelOptions.MODEL_HELP, group=SETTINGS)
    dataset: str | None = option(None, ", ".join(dataset_names()), group=SETTINGS)
    checkpoint: str | None = option(
        None, "starting weights; a head of other classes is replaced", metavar="F", group=SETTINGS
    )


def run(options: Options) -> None:
    options.run(RECIPES, finetune)
