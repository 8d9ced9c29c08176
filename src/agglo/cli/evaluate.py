"""agglo evaluate"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

from agglo.classification.data import dataset_named, dataset_names
from agglo.classification.data.transforms import FRAMES
from agglo.cli.arguments import (
    add_command,
    add_execution,
    add_model,
    add_reduction,
    model_spec,
    number,
    positive,
)
from agglo.cli.grids import add_output, add_workers, grid_settings, tell
from agglo.experiments.tables import Column, Table

_ABOUT = "accuracy and speed of a classifier, dense and reduced, on a data set"

_DETAILS = """\
Top-1 and top-5, or mAP where images have several labels, of a model as it is and with its tokens reduced. Several
methods, linkages, keep rates or schedules make a grid; what a method cannot reach is shown as "cannot", with the
reason. With --json a run that was stopped goes on where it was: type the same command again.

Data sets, by the layout of DIR (docs/evaluate.md has the details):
{data_sets}

Images for timm's models are resized to 8/7 of the model's size and cropped in the middle, for others as the model's own
configuration says (--frame chooses); those of {whole} are not cropped.

MODEL is of timm by its plain name, or of another library:
  deit_tiny_patch16_224, hf-hub:ORG/NAME, local-dir:PATH      timm: by name, on the hub, in a folder
  hf:PATH, hf:ORG/NAME                                        transformers: a folder of save_pretrained, or on the hub
  torchvision:vit_b_16, torchvision:vit_b_16:TAG              torchvision; TAG is one of its weights
  open_clip:ViT-B-32, open_clip:ViT-B-32:TAG                  open_clip, likewise; also open_clip:local-dir:PATH
"""

_METHODS = ["atc"]

_EXAMPLES = """\
examples:
  agglo evaluate deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --data imagenet --keep-rate 0.5
  agglo evaluate deit_small_patch16_224 --pretrained --data imagenet --method atc tome \\
      --linkage single average complete --keep-rate 0.9 0.7 0.5 0.25 --json shelf.json --plot shelf.png
  agglo evaluate vit_base_patch16_224.mae --checkpoint mae_finetuned_vit_base.pth --data imagenet \\
      --proportional off --schedule constant:8 constant:16 linear:8 linear:16
  agglo evaluate deit_small_patch16_224 --checkpoint birds.pth --data nabirds --method evit --keep-rate 0.7 --no-dense
  agglo evaluate hf:my-vit --data birds --keep-rate 0.7 0.5
  agglo evaluate torchvision:vit_b_16 --pretrained --data imagenet --keep-rate 0.5
  agglo evaluate open_clip:ViT-B-32:openai --zero-shot --data imagenet --keep-rate 0.5
  accelerate launch --num_processes 4 -m agglo evaluate deit_base_patch16_224 --pretrained --data imagenet --device cuda
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "evaluate", about=_ABOUT, details=_details(), examples=_EXAMPLES)
    add_model(parser, positional=True, zero_shot="the data set's")
    _add_data(parser)
    add_reduction(parser, _METHODS, "none, the dense model alone", dense=True)
    how = parser.add_argument_group("how it runs")
    add_execution(how)
    add_workers(how)
    how.add_argument(
        "--cache",
        type=number,
        default=4.0,
        metavar="GB",
        help="keep images in memory for the next cell if all of them fit (default: %(default)g GB per process)",
    )
    add_output(parser, "accuracy")
    parser.set_defaults(run=run)


def _details() -> str:
    known = [dataset_named(name) for name in dataset_names()]
    whole = [dataset.name for dataset in known if dataset.squash or dataset.crop == 1]
    table = Table([Column("name", left=True), Column("what DIR holds", left=True)], [[d.name, d.about] for d in known])
    return _DETAILS.format(data_sets=indent(table.text(), "  "), whole=", ".join(whole))


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the data set")
    group.add_argument(
        "--dataset",
        metavar="NAME",
        help=f"{', '.join(dataset_names())} (default: found by the files of DIR)",
    )
    group.add_argument("--images", type=positive, metavar="N", help="only N images, evenly spread (default: all)")
    group.add_argument(
        "--crop-pct",
        type=number,
        metavar="P",
        help="side of the crop, as a fraction of the resized image's (default: as --frame says; the study's is 0.875)",
    )
    group.add_argument(
        "--frame",
        choices=FRAMES,
        help="how pictures are resized and cropped: as in the study, or as the model's own configuration says "
        "(default: study for timm's models, model for all others)",
    )
    group.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out missing and unreadable images and count them; reads all images once more",
    )


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification.evaluation.grid import EvaluationSettings
    from agglo.classification.evaluation.grid import run as evaluate
    from agglo.classification.evaluation.report import plot, text

    settings = EvaluationSettings(
        model=model_spec(arguments),
        crop=arguments.crop_pct,
        frame=arguments.frame,
        cache_gigabytes=arguments.cache,
        **grid_settings(arguments, _METHODS),
    )
    if settings.model.has_random_weights:
        print("agglo: weights are random, and so are the answers; give --checkpoint or --pretrained", file=sys.stderr)
    tell(evaluate(settings, arguments.json), arguments, text, plot)
