"""Train the embedded generator, a class-conditional diffusion transformer with 256 tokens, on Fashion-MNIST.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv (loss on test images at fixed noise; lower is better), best/model.safetensors,
last/model.safetensors, last/state.pt (to go on from), and result.json once the run is done.
`agglo generate embedded --weights RUN/best/model.safetensors` uses the weights.
On several GPUs or machines: accelerate launch -m agglo train-generator ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agglo.lab.cli.training import tell_best
from agglo.lab.options import matching, option
from agglo.lab.tasks.synthesis.training.trainer import GeneratorSettings, train_generator

EXAMPLES = """\
examples:
  agglo train-generator --data fashion-mnist --output runs/generator
  agglo train-generator --data fashion-mnist --output runs/longer --epochs 20 --precision bf16
"""


@dataclass(frozen=True, kw_only=True)
class Options(GeneratorSettings):
    """What to train."""

    data: Path = option(help="folder of Fashion-MNIST's idx files", metavar="DIR")
    output: Path = option(help="folder of the run", metavar="DIR")


def run(options: Options) -> None:
    settings = GeneratorSettings(**matching(GeneratorSettings, options))
    tell_best(train_generator(settings, options.data, options.output), options.output)
