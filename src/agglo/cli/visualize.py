"""agglo visualize"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_model, model_spec, number, positive

_ABOUT = "draw which patches of an image are merged into which groups, stage by stage"

_DETAILS = """\
Draws the crop the model saw, then its groups after each stage: every group in its mean colour, outlined in a colour
it keeps from stage to stage. Several methods, linkages, keep rates or images become the rows of one sheet.
"""

_EXAMPLES = """\
examples:
  agglo visualize cat.jpg --checkpoint deit_tiny.safetensors -o cat.png
  agglo visualize cat.jpg --pretrained --linkage single average complete --keep-rate 0.25 -o linkages.png
  agglo visualize cat.jpg --pretrained --method atc tome --keep-rate 0.5 -o methods.png
  agglo visualize cat.jpg --pretrained --threshold 0.1 --blocks 4 8 -o dynamic.png
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "visualize",
        help=_ABOUT,
        description=_DETAILS,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="one or more image files")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="F", help="the picture to write: .png, .jpg or .webp"
    )
    parser.add_argument("--scale", type=positive, default=2, metavar="N", help="enlarge N times (default: %(default)s)")
    add_model(parser)
    group = parser.add_argument_group("reduction")
    group.add_argument("--method", nargs="+", default=["atc"], metavar="M", help="atc, tome (default: atc)")
    group.add_argument("--linkage", nargs="+", metavar="L", help="single, average, complete; of atc (default: average)")
    how_far = group.add_mutually_exclusive_group()
    how_far.add_argument(
        "--keep-rate",
        nargs="+",
        type=number,
        metavar="R",
        help="fraction of patch tokens that stays at each stage (default: 0.5)",
    )
    how_far.add_argument(
        "--threshold",
        nargs="+",
        type=number,
        metavar="D",
        help="instead: merge up to this cosine distance, so that every image keeps what it needs",
    )
    group.add_argument(
        "--blocks",
        nargs="+",
        type=int,
        metavar="B",
        help="0-based blocks that reduce (default: a quarter, a half and three quarters of the depth)",
    )
    group.add_argument(
        "--features",
        metavar="F",
        help="what tokens are compared by: keys, keys_per_head, tokens, values (default: keys)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.study.variants import cross
    from agglo.study.visualize import require_image_name, visualize

    output = require_image_name(arguments.output)
    variants = cross(
        arguments.method,
        keep_rates=arguments.keep_rate or ([] if arguments.threshold else [0.5]),
        thresholds=arguments.threshold or [],
        linkages=arguments.linkage,
        features=arguments.features,
        blocks=arguments.blocks,
    )
    spec = model_spec(arguments)
    if spec.has_random_weights:
        print("agglo: weights are random, and so are the groups; give --checkpoint or --pretrained", file=sys.stderr)
    visualize(spec, arguments.images, variants, scale=arguments.scale).save(output)
    print(output)
