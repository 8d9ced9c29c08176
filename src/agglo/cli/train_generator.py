"""agglo train-generator: train the small diffusion model that `agglo generate embedded` uses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_command

_ABOUT = "train a small diffusion model on Fashion-MNIST, for agglo generate"

_DETAILS = """\
Train the embedded generator, a class-conditional diffusion transformer with 256 tokens, on Fashion-MNIST.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv (loss on test images at fixed noise; lower is better), best/model.safetensors,
last/model.safetensors, last/state.pt (to go on from), and result.json once the run is done.
`agglo generate embedded --weights RUN/best/model.safetensors` uses the weights.
On several GPUs or machines: accelerate launch -m agglo train-generator ...
"""

_EXAMPLES = """\
examples:
  agglo train-generator --data fashion-mnist --output runs/generator
  agglo train-generator --data fashion-mnist --output runs/longer --epochs 20 --precision bf16
"""


def add_to(commands: Any) -> None:
    from dataclasses import fields

    from agglo.experiments.training.settings import explanations
    from agglo.synthesis.training.settings import GeneratorSettings

    parser = add_command(commands, "train-generator", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the run")
    group = parser.add_argument_group("settings")
    meanings = explanations(GeneratorSettings)
    for field in fields(GeneratorSettings):
        flag, help_text = "--" + field.name.replace("_", "-"), f"{meanings[field.name]} (default: %(default)s)"
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=help_text)
        else:
            group.add_argument(flag, type=type(field.default), default=field.default, metavar="V", help=help_text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from dataclasses import fields

    from agglo.synthesis.training.settings import GeneratorSettings

    settings = GeneratorSettings(**{field.name: getattr(arguments, field.name) for field in fields(GeneratorSettings)})
    from accelerate import PartialState

    from agglo.synthesis.training.trainer import train_generator

    best = train_generator(settings, arguments.data, arguments.output)
    if PartialState().is_main_process:
        print(f"best: {', '.join(f'{name} {value:.4g}' for name, value in best.items())}; {arguments.output / 'best'}")
