"""Train a few parameters of a reduced model until its outputs come near the dense model's again, without labels.

Part of the images are never trained on: what they show, with its standard error, is the report. A model is never worse
than it was: where the images gain nothing, the parameters are put back.

Writes OUT.safetensors, which loads into the plain model by its own names and holds the config that it was healed for;
the distance over the steps as OUT.png; and the report as OUT.txt. A run that was stopped goes on where it was: type the
same command again. On several GPUs or machines: accelerate launch -m agglo heal ..., or torchrun -m agglo heal ...
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from agglo.healing import Trained
from agglo.lab.cli.arguments import ReductionOptions
from agglo.lab.options import (
    AtLeastOne,
    DeviceOptions,
    ModelOptions,
    device_or_best,
    option,
    require_plot_name,
)
from agglo.lab.tasks.classification.data import dataset_names
from agglo.lab.tasks.classification.healing import heal_on_folder
from agglo.utils.files import replacing, require_output

EXAMPLES = """\
examples:
  agglo heal deit_small_patch16_224 --pretrained --data imagenet --keep-rate 0.5 -o healed.safetensors
  agglo heal deit_tiny_patch16_224 --pretrained --data photos --tuned deit_tiny_patch16_224-half -o half.safetensors
  agglo evaluate deit_tiny_patch16_224 --checkpoint half.safetensors --data imagenet --tuned deit_tiny_patch16_224-half
"""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, ReductionOptions, DeviceOptions):
    """What to heal."""

    GROUP: ClassVar = "data"
    HOW: ClassVar = DeviceOptions.GROUP

    model: str = option(help=ModelOptions.MODEL_HELP, positional=True, metavar="MODEL", group=ModelOptions.GROUP)
    output: Path = option(help="what to write", flags=("-o", "--output"), metavar="OUT.safetensors", group=None)
    data: Path = option(help="folder of a data set, as for evaluate", metavar="DIR")
    dataset: str | None = option(None, f"{', '.join(dataset_names())} (default: found by its files)")
    split: Literal["train", "val"] | None = option(None, "(default: train, where there is one)")
    images: AtLeastOne = option(2000, "evenly spread over them")
    parameters: Trained = option("norms", "what is trained", group=HOW)
    minutes: float = option(10.0, "about", metavar="T", group=HOW)
    steps: AtLeastOne | None = option(None, "in place of what fits into the minutes", group=HOW)
    lr: float = option(2e-3, "highest learning rate", group=HOW)
    batch_size: AtLeastOne = option(16, group=HOW)
    precision: Literal["no", "bf16"] = option("no", "mixed precision", group=HOW)
    seed: int = option(0, group=HOW)


def run(options: Options) -> None:
    output = require_output(options.output)
    if output.suffix != ".safetensors":
        raise ValueError(f"-o {str(output)!r} must end in .safetensors; a .png and a .txt are written beside it")
    plot = require_plot_name(output.with_suffix(".png"))
    configs = list(options.configs())
    if len(configs) != 1:
        raise ValueError(f"one reduction is healed, not {len(configs)}: give --keep-rate, --schedule or --tuned once")
    how = ("dataset", "split", "images", "threads", "parameters", "minutes", "steps", "lr", "batch_size", "seed")
    unfinished = output.with_suffix(".state.pt")
    healed = heal_on_folder(
        options.trained_spec(),
        configs[0],
        options.data,
        device=device_or_best(options.device),
        autocast=torch.bfloat16 if options.precision == "bf16" else None,
        checkpoint=unfinished,
        **{name: getattr(options, name) for name in how},
    )
    if os.environ.get("RANK", "0") != "0":
        return
    healed.save(output)
    healed.plot(plot)
    report = healed.report()
    with replacing(output.with_suffix(".txt")) as text:
        text.write_text(f"{report}\n", encoding="utf-8")
    unfinished.unlink(missing_ok=True)
    print(report)
