"""agglo detect train, agglo detect evaluate, agglo detect show"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.cli.arguments import (
    Parser,
    add_command,
    add_execution,
    add_reduction,
    budgets,
    device,
    number,
    positive,
    variants,
    whole,
)
from agglo.cli.grids import add_output, add_workers, grid_settings, tell
from agglo.cli.training import add_choices, add_folders, add_look, run_by_recipe

_ABOUT = "object detection and instance segmentation with reduced tokens: train, evaluate, show"

_DETAILS = """\
Mask R-CNN on ViT-Adapter, dense or with tokens reduced in the backbone by any method: the detector's neck and heads
get full maps, since merged tokens are put back in their places.

  agglo detect train     train a detector by a recipe, crash-safe, on any number of devices
  agglo detect evaluate  box and mask AP, GFLOPs and speed, dense and reduced, on COCO or any data in its format
  agglo detect show      boxes and masks over pictures, dense beside reduced, and the groups of tokens under them
"""

_MODEL = """\
MODEL is "tiny" or "small" (with --checkpoint F), the folder of a run of `agglo detect train`, a file of weights
(agglo's own, or those that the authors of ViT-Adapter, SViT and ATC publish), or "embedded": the detector of garments
in the package.
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
  agglo detect train --list
  agglo detect train dense --checkpoint deit_tiny.safetensors --data coco --output runs/dense
  agglo detect train finetune --checkpoint runs/dense/best/model.safetensors --data coco --output runs/atc50 \\
      --method atc --linkage complete --keep-rate 0.5
  agglo detect train small_data --checkpoint deit_tiny.safetensors --data nuclei --output runs/nuclei
  agglo detect train small_data --data coco128 --output runs/overfit \\
      --set from_scratch=true images=12 held_out=0 epochs=50
  accelerate launch --num_processes 4 -m agglo detect train dense --show
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
  accelerate launch --num_processes 4 -m agglo detect evaluate runs/dense --data coco --keep-rate 0.5 --device cuda
"""

_SHOW = f"""\
Draw what a detector finds: for each picture a row with the dense detector's boxes and masks, then, for each reduction,
its boxes and masks and the groups of tokens they were found with.

{_MODEL}"""

_SHOW_EXAMPLES = """\
examples:
  agglo detect show street.jpg --model runs/dense --keep-rate 0.5 -o street.png
  agglo detect show a.jpg b.jpg --model tiny --checkpoint mask_rcnn_deit_tiny.pth --method atc tome --keep-rate 0.25 \\
      --score 0.5 -o both.png
"""

_METHODS = ["atc"]
_SETTINGS = {
    "model": "tiny, small, miniature, or a timm ViT",
    "dataset": "coco, scenes",
    "skip_bad": "leave out bad images and annotations and count them",
    "checkpoint": "starting weights: of a timm ViT, or of a detector",
}


def add_to(commands: Any) -> None:
    top = add_command(commands, "detect", about=_ABOUT, details=_DETAILS, examples="")
    actions = top.add_subparsers(
        title="commands", metavar="<command>", dest="action", required=True, parser_class=Parser
    )
    _add_train(actions)
    _add_evaluate(actions)
    _add_show(actions)


def _add_train(actions: Any) -> None:
    parser = add_command(
        actions,
        "train",
        about="train a detector by a recipe, crash-safe, on any number of devices",
        details=_TRAIN,
        examples=_TRAIN_EXAMPLES,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="its name, or the path of a .toml file")
    add_folders(parser, data="folder of the data set, or a JSON file", output="folder of the run")
    add_look(parser)
    add_choices(parser, "agglo detect train", **_SETTINGS)
    parser.set_defaults(run=run_train)


def _add_evaluate(actions: Any) -> None:
    parser = add_command(
        actions,
        "evaluate",
        about="AP, GFLOPs and speed of a detector, dense and reduced",
        details=_EVALUATE,
        examples=_EVALUATE_EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a name, the folder of a run, or a file of weights")
    parser.add_argument("--checkpoint", type=Path, metavar="F", help="the weights of a name")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, required=True, metavar="DATA", help="folder of the data set, or a JSON file")
    data.add_argument("--dataset", choices=["coco", "scenes"], default="coco", help="(default: %(default)s)")
    data.add_argument("--split", choices=["train", "val"], default="val", help="(default: %(default)s)")
    data.add_argument("--images", type=positive, metavar="N", help="only N images, evenly spread (default: all)")
    data.add_argument(
        "--image-size",
        type=positive,
        metavar="N",
        help="make images squares of this side (default: as the model was trained, or a short side of 800)",
    )
    data.add_argument("--skip-bad", action="store_true", help="leave out bad images and annotations and count them")
    add_reduction(parser, _METHODS, "none, the dense detector alone", dense=True)
    how = parser.add_argument_group("how it runs")
    add_execution(how, batch_size=1)
    add_workers(how)
    how.add_argument(
        "--turns",
        type=whole,
        default=8,
        metavar="N",
        help="images that all cells run in turns, for speeds that can be compared; 0 takes those of each cell's own "
        "pass (default: %(default)s)",
    )
    out = add_output(parser, "AP")
    out.add_argument("--detections", type=Path, metavar="DIR", help="what was found, as COCO results, a file per cell")
    parser.set_defaults(run=run_evaluate)


def _add_show(actions: Any) -> None:
    parser = add_command(
        actions,
        "show",
        about="boxes, masks and groups of tokens over pictures",
        details=_SHOW,
        examples=_SHOW_EXAMPLES,
    )
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--model", required=True, metavar="MODEL", help="a name, the folder of a run, or a file")
    parser.add_argument("--checkpoint", type=Path, metavar="F", help="the weights of a name")
    parser.add_argument("--image-size", type=positive, metavar="N", help="make images squares of this side")
    parser.add_argument(
        "--score", type=number, default=0.3, metavar="S", help="least score of what is drawn (default: %(default)g)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: the best one there is)")
    add_reduction(parser, _METHODS, "0.5", dense=False)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="F", help="the picture: .png, .jpg, ...")
    parser.set_defaults(run=run_show)


def run_train(arguments: argparse.Namespace) -> None:
    from agglo.detection.training.recipe import RECIPES

    run_by_recipe(arguments, RECIPES, _train)


def _train(settings: Any, data: Path, output: Path) -> dict[str, Any]:
    from agglo.detection.training.trainer import train_detector

    return train_detector(settings, data, output)


def run_evaluate(arguments: argparse.Namespace) -> None:
    from agglo.detection.evaluation.grid import EvaluationSettings
    from agglo.detection.evaluation.grid import run as evaluate
    from agglo.detection.evaluation.report import plot, text

    settings = EvaluationSettings(
        model=arguments.model,
        checkpoint=arguments.checkpoint,
        split=arguments.split,
        image_size=arguments.image_size,
        turns=arguments.turns,
        detections=arguments.detections,
        **grid_settings(arguments, _METHODS),
    )
    report = evaluate(settings, arguments.json)
    if report["model"]["weights"] == "random":
        print("agglo: weights are random, and so is what was found; give --checkpoint", file=sys.stderr)
    tell(report, arguments, text, plot)


def run_show(arguments: argparse.Namespace) -> None:
    from agglo.detection.evaluation.pictures import show
    from agglo.experiments.image_files import require_image_name

    require_image_name(arguments.output)
    show(
        arguments.model,
        arguments.images,
        variants(arguments, budgets(arguments) or ({} if arguments.tuned else {"keep_rates": [0.5]}), _METHODS),
        checkpoint=arguments.checkpoint,
        image_size=arguments.image_size,
        least_score=arguments.score,
        device=device(arguments),
    ).save(arguments.output)
