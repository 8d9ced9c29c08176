"""agglo evaluate"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

from agglo.classification.data import dataset_named, dataset_names
from agglo.cli.arguments import (
    add_budget,
    add_command,
    add_execution,
    add_methods,
    add_model,
    add_where,
    budgets,
    device,
    method_options,
    model_spec,
    number,
    positive,
    whole,
)
from agglo.experiments.tables import Column, Table

_ABOUT = "accuracy and speed of a classifier, dense and reduced, on a data set"

_DETAILS = """\
Top-1 and top-5, or mAP where images have several labels, of a model as it is and with its tokens reduced. Several
methods, linkages, keep rates or schedules make a grid; what a method cannot reach is shown as "cannot", with the
reason. With --json a run that was stopped goes on where it was: type the same command again.

Data sets, by the layout of DIR (docs/evaluate.md has the details):
{data_sets}
Images are resized to 8/7 of the model's size and cropped in the middle; those of {whole} are not cropped.
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
  accelerate launch --num_processes 4 -m agglo evaluate deit_base_patch16_224 --pretrained --data imagenet --device cuda
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "evaluate", about=_ABOUT, details=_details(), examples=_EXAMPLES)
    add_model(parser, positional=True)
    _add_data(parser)
    _add_reduction(parser)
    how = parser.add_argument_group("how it runs")
    add_execution(how)
    how.add_argument("--workers", type=whole, default=2, metavar="N", help="that read images (default: %(default)s)")
    how.add_argument(
        "--cache",
        type=number,
        default=4.0,
        metavar="GB",
        help="keep images in memory for the next cell if all of them fit (default: %(default)g GB per process)",
    )
    out = parser.add_argument_group("output, besides the table")
    out.add_argument("--json", type=Path, metavar="F", help="all results, complete after every cell; goes on if there")
    out.add_argument("--plot", type=Path, metavar="F", help="accuracy by keep rate and speed, as .png, .svg or .pdf")
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
        help="side of the crop, as a fraction of the resized image's (default: 0.875, as DeiT; 0.9 is timm's for it)",
    )
    group.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out missing and unreadable images and count them; reads all images once more",
    )


def _add_reduction(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reduction")
    add_methods(group, _METHODS)
    add_budget(group, "none, the dense model alone")
    add_where(group)
    group.add_argument(
        "--proportional",
        choices=["on", "off"],
        help="whether a merged token weighs in attention as much as its members did (default: the method's)",
    )
    group.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="any other option of a method, for those that have it",
    )
    group.add_argument("--no-dense", action="store_true", help="do not evaluate the model without reduction too")
    group.set_defaults(method=None)  # to tell what was typed from what is taken otherwise


def run(arguments: argparse.Namespace) -> None:
    from agglo.bench.model_report import require_plot_name
    from agglo.classification.evaluation.grid import EvaluationSettings
    from agglo.classification.evaluation.grid import run as evaluate
    from agglo.classification.evaluation.report import plot, text
    from agglo.experiments.files import require_output
    from agglo.experiments.variants import variants_of

    if arguments.plot is not None:
        require_plot_name(arguments.plot)
    if arguments.json is not None:
        require_output(arguments.json)
    asked = budgets(arguments)
    if not asked:
        _require_nothing_typed(arguments)
    variants = variants_of(
        arguments.method or _METHODS,
        **asked,
        linkages=arguments.linkage,
        features=arguments.features,
        blocks=arguments.blocks,
        proportional=None if arguments.proportional is None else arguments.proportional == "on",
        options=method_options(arguments.option),
    )
    settings = EvaluationSettings(
        model=model_spec(arguments),
        data=arguments.data,
        variants=variants,
        dense=not arguments.no_dense,
        dataset=arguments.dataset,
        images=arguments.images,
        crop=arguments.crop_pct,
        skip_bad=arguments.skip_bad,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        threads=arguments.threads,
        device=device(arguments),
        dtype=arguments.dtype,
        cache_gigabytes=arguments.cache,
    )
    if settings.model.has_random_weights:
        print("agglo: weights are random, and so are the answers; give --checkpoint or --pretrained", file=sys.stderr)
    report = evaluate(settings, arguments.json)
    if os.environ.get("RANK", "0") != "0":
        return
    print(text(report))
    if arguments.plot is not None:
        plot(report, arguments.plot)


def _require_nothing_typed(arguments: argparse.Namespace) -> None:
    """Raise for what says how tokens are reduced where no budget is given: the dense model alone would answer."""
    if arguments.no_dense:
        raise ValueError("--no-dense leaves nothing to evaluate without one of --keep-rate, --threshold and --schedule")
    for option in ("method", "linkage", "features", "blocks", "proportional", "option"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} says nothing without one of --keep-rate, --threshold and --schedule")
