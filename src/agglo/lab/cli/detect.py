"""Detect objects and segment instances with reduced tokens: train, evaluate, show.

Mask R-CNN on ViT-Adapter, dense or with tokens reduced in the backbone by any method: the detector's neck and heads
get full maps, since merged tokens are put back in their places.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from agglo.lab.cli.arguments import GridOptions, ReductionOptions
from agglo.lab.cli.training import SETTINGS, RecipeOptions
from agglo.lab.data.image_files import require_image_name
from agglo.lab.evaluation.grid import run_grid
from agglo.lab.options import AtLeastOne, ExecutionOptions, Whole, device_or_best, option
from agglo.lab.tasks.detection.evaluation.figures import show
from agglo.lab.tasks.detection.evaluation.grid import METRICS, Evaluation, EvaluationSettings, text
from agglo.lab.tasks.detection.training.settings import RECIPES
from agglo.lab.tasks.detection.training.trainer import train_detector

_MODEL = """\
MODEL is "tiny" or "small" (with --checkpoint F), the folder of a run of `agglo detect train`, a file of weights
(agglo's own, or those that the authors of SViT and ATC publish), or "embedded": the detector of garments in the
package.
"""
_DATA = """\
DATA is COCO's folder (annotations/instances_val2017.json, val2017/), a folder with instances*.json beside images/, or
such a JSON file; with --dataset scenes, the folder of Fashion-MNIST's idx files.
"""
_TRAIN = f"""\
Train a detector as a recipe says: dense, or with tokens reduced by any method from the first step on.

The same command goes on where an earlier one was stopped or killed, and ends with the same weights. The folder of
the run holds settings.json, log.csv, best/model.safetensors, last/model.safetensors, last/state.pt (to go on from),
and result.json once the run is done.
On several GPUs or machines: accelerate launch -m agglo detect train ..., or torchrun -m agglo detect train ...

{_DATA}"""
_TRAIN_EXAMPLES = """\
examples:
  agglo detect train dense --checkpoint deit_tiny.safetensors --data coco --output runs/dense
  agglo detect train finetune --checkpoint runs/dense/best/model.safetensors --data coco --output runs/atc50 \\
      --method atc --linkage complete --keep-rate 0.5
  agglo detect train small_data --data coco128 --output runs/overfit \\
      --set from_scratch=true images=12 held_out=0 epochs=50
"""
_EVALUATE = f"""\
Box and mask AP (all of COCO's twelve numbers), GFLOPs of the backbone and images per second of a detector as it is and
with its tokens reduced. Several methods, linkages, keep rates or schedules make a grid; what a method cannot reach is
shown as "cannot", with the reason. With --json a run that was stopped goes on where it was: type the same command
again.

{_MODEL}
{_DATA}"""
_EVALUATE_EXAMPLES = """\
examples:
  agglo detect evaluate runs/dense --data coco --method atc tome --linkage average complete \\
      --keep-rate 0.9 0.7 0.5 0.25 --json shelf.json --plot shelf.png
  agglo detect evaluate tiny --checkpoint mask_rcnn_deit_tiny.pth --data coco --images 500 --keep-rate 0.7
  agglo detect evaluate embedded --dataset scenes --data fashion-mnist --keep-rate 0.25 --detections found
"""
_SHOW = f"""\
Draw what a detector finds: for each image a row with the dense detector's boxes and masks, then, for each reduction,
its boxes and masks and the groups of tokens they were found with.

{_MODEL}"""
_SHOW_EXAMPLES = """\
examples:
  agglo detect show a.jpg b.jpg --model runs/dense --method atc tome --keep-rate 0.25 --score 0.5 -o both.png
"""


def add_commands(parser: argparse.ArgumentParser) -> None:
    actions: Any = parser.add_subparsers(title="commands", metavar="<command>", dest="action", required=True)
    for options, run, summary, description, examples in (
        (TrainOptions, run_train, "train a detector by a recipe, crash-safe", _TRAIN, _TRAIN_EXAMPLES),
        (EvaluateOptions, run_evaluate, "AP, GFLOPs and speed, dense and reduced", _EVALUATE, _EVALUATE_EXAMPLES),
        (ShowOptions, run_show, "boxes, masks and groups of tokens over images", _SHOW, _SHOW_EXAMPLES),
    ):
        name = run.__name__.removeprefix("run_")
        actions.add_parser(name, help=summary, description=description, epilog=examples).add_run(options, run)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RecipeOptions):
    """What to train."""

    GROUP: ClassVar = SETTINGS

    data: Path | None = option(None, "folder of the data set, or a JSON file", metavar="DIR", group=None)
    model: str | None = option(None, "tiny, small, miniature, or a timm ViT")
    dataset: str | None = option(None, "coco, scenes")
    checkpoint: str | None = option(None, "starting weights: of a timm ViT, or of a detector", metavar="F")


def run_train(options: TrainOptions) -> None:
    options.run(RECIPES, train_detector)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(GridOptions):
    """What to evaluate."""

    GROUP: ClassVar = "data"

    model: str = option(
        help="a name, the folder of a run, or a file of weights", positional=True, metavar="MODEL", group=None
    )
    checkpoint: Path | None = option(None, "the weights of a name", group=None)
    data: Path = option(help="folder of the data set, or a JSON file", metavar="DATA")
    dataset: Literal["coco", "scenes"] = option("coco")
    split: Literal["train", "val"] = option("val")
    image_size: AtLeastOne | None = option(
        None, "make images squares of this side (default: as the model was trained, or a short side of 800)"
    )
    batch_size: AtLeastOne = 1
    turns: Whole = option(
        8,
        "images that all cells run in turns, for speeds that can be compared; 0 takes those of each cell's own pass",
        group=ExecutionOptions.GROUP,
    )
    detections: Path | None = option(
        None, "what was found, as COCO results, a file per cell", metavar="DIR", group="output, besides the tables"
    )


def run_evaluate(options: EvaluateOptions) -> None:
    report = run_grid(Evaluation, options.settings(EvaluationSettings), options.json)
    if report["model"]["weights"] == "random":
        print("agglo: weights are random, and so is what was found; give --checkpoint", file=sys.stderr)
    options.tell(report, text, METRICS)


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ReductionOptions):
    """What to draw."""

    images: Sequence[Path] = option(positional=True, metavar="IMAGE")
    model: str = option(help="a name, the folder of a run, or a file", metavar="MODEL")
    checkpoint: Path | None = option(None, "the weights of a name")
    score: float = option(0.3, "least score of what is drawn", metavar="S")
    device: str | None = option(None, "cpu, cuda, cuda:1, mps, xpu (default: the best one there is)", metavar="D")
    output: Path = option(help="the image: .png, .jpg, ...", flags=("-o", "--output"))


def run_show(options: ShowOptions) -> None:
    require_image_name(options.output)
    device = device_or_best(options.device)
    how: dict[str, Any] = {"checkpoint": options.checkpoint, "least_score": options.score, "device": device}
    show(options.model, options.images, options.configs([0.5]), **how).save(options.output)
