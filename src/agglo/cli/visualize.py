"""agglo visualize"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.cli.arguments import (
    add_budget,
    add_command,
    add_methods,
    add_model,
    add_where,
    budgets,
    model_spec,
    positive,
)

_ABOUT = "draw which patches of an image are merged into which groups, stage by stage"

_DETAILS = """\
Draws the crop the model saw, then its groups after each stage: every group in its mean colour, outlined in a colour
it keeps from stage to stage. Several methods, linkages, keep rates, schedules or images become the rows of one sheet.
"""

_EXAMPLES = """\
examples:
  agglo visualize cat.jpg --checkpoint deit_tiny.safetensors -o cat.png
  agglo visualize cat.jpg --pretrained --linkage single average complete --keep-rate 0.25 -o linkages.png
  agglo visualize cat.jpg --pretrained --method atc tome --keep-rate 0.5 -o methods.png
  agglo visualize cat.jpg --pretrained --schedule stages:0.5@4,8 linear:16 -o schedules.png
  agglo visualize cat.jpg --pretrained --threshold 0.1 --blocks 4 8 -o dynamic.png
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "visualize", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="one or more image files")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="F", help="the picture to write: .png, .jpg or .webp"
    )
    parser.add_argument("--scale", type=positive, default=2, metavar="N", help="enlarge N times (default: %(default)s)")
    add_model(parser)
    group = parser.add_argument_group("reduction")
    add_methods(group, ["atc"])
    add_budget(group, "0.5")
    add_where(group)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification.evaluation.pictures import require_image_name, visualize
    from agglo.experiments.variants import variants_of

    output = require_image_name(arguments.output)
    variants = variants_of(
        arguments.method,
        **(budgets(arguments) or {"keep_rates": [0.5]}),
        linkages=arguments.linkage,
        features=arguments.features,
        blocks=arguments.blocks,
    )
    spec = model_spec(arguments)
    if spec.has_random_weights:
        print("agglo: weights are random, and so are the groups; give --checkpoint or --pretrained", file=sys.stderr)
    visualize(spec, arguments.images, variants, scale=arguments.scale).save(output)
    print(output)
