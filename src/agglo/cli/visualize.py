"""agglo visualize"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agglo.cli.arguments import (
    add_budget,
    add_command,
    add_methods,
    add_model,
    add_where,
    budgets,
    model_spec,
    positive,
    whole,
)

if TYPE_CHECKING:
    from agglo.experiments.models import ModelSpec
    from agglo.experiments.variants import Variant

_ABOUT = "draw which patches of an image are merged into which groups, stage by stage"

_DETAILS = """\
One row for each image: the crop the model saw, then its groups, each washed in its mean colour, with the model's first
answer below, dense and reduced. One method shows its groups after every stage; several methods, linkages or budgets
stand side by side, each with its groups after the last stage.

To a .gif file: one image that dissolves into its groups, the cuts of the tree over its tokens at one block, which
--blocks names (default: at a quarter of the depth); --keep-rate says where it ends (default: with 12 tokens).
"""

_EXAMPLES = """\
examples:
  agglo visualize cat.jpg --checkpoint deit_tiny.safetensors -o cat.png
  agglo visualize cat.jpg --pretrained -o cat.gif
  agglo visualize cat.jpg --pretrained --linkage single average complete --keep-rate 0.25 -o linkages.png
  agglo visualize cat.jpg --pretrained --method atc tome --keep-rate 0.5 -o methods.png
  agglo visualize cat.jpg --pretrained --schedule stages:0.5@4,8 linear:16 -o schedules.png
  agglo visualize cat.jpg --model hf:my-vit --keep-rate 0.25 -o mine.png
  agglo visualize cat.jpg --model open_clip:ViT-B-32:openai --zero-shot --class-names animals.txt -o clip.png
  agglo visualize cat.jpg --pretrained --threshold 0.1 --blocks 4 8 -o dynamic.png
"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "visualize", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="one or more image files")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="F", help="what to write: .png, .jpg, .webp; .gif moves"
    )
    parser.add_argument("--scale", type=positive, default=2, metavar="N", help="enlarge N times (default: %(default)s)")
    parser.add_argument(
        "--after", type=whole, metavar="B", help="groups as they are after block B (default: after the last stage)"
    )
    add_model(parser, zero_shot="ImageNet's 1000")
    group = parser.add_argument_group("reduction")
    add_methods(group, ["atc"])
    add_budget(group, "0.5")
    add_where(group)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.classification.evaluation.pictures import visualize
    from agglo.experiments.image_files import require_image_name
    from agglo.experiments.variants import variants_of

    output = require_image_name(arguments.output)
    moves = output.suffix.lower() == ".gif"
    variants = variants_of(
        arguments.method,
        **(budgets(arguments) or {"keep_rates": [0.5]}),
        linkages=arguments.linkage,
        features=arguments.features,
        blocks=arguments.blocks,
    )
    if moves:
        _require_one(arguments, variants)
    spec = model_spec(arguments)
    if spec.has_random_weights:
        print("agglo: weights are random, and so are the groups; give --checkpoint or --pretrained", file=sys.stderr)
    if moves:
        _animate(arguments, spec, variants[0], output)
    else:
        visualize(spec, arguments.images, variants, after=arguments.after, scale=arguments.scale).save(output)
    print(output)


def _require_one(arguments: argparse.Namespace, variants: list[Variant]) -> None:
    """An animation is of one image, one method and one block."""
    output = f"output={str(arguments.output)!r}"
    for given, number in (("images", len(arguments.images)), ("methods or keep rates", len(variants))):
        if number > 1:
            raise ValueError(f"{output} is an animation of one image and one method, not of {number} {given}")
    if arguments.threshold or arguments.schedule or arguments.after is not None or len(arguments.blocks or [0]) > 1:
        raise ValueError(
            f"{output} is an animation: it takes --keep-rate and one block, not --threshold, --schedule or --after"
        )


def _animate(arguments: argparse.Namespace, spec: ModelSpec, variant: Variant, output: Path) -> None:
    from agglo.classification.evaluation.pictures import animate
    from agglo.drawing.animation import save_animation

    block = arguments.blocks[0] if arguments.blocks else None
    rate = variant.keep_rate if arguments.keep_rate else None
    frames = animate(spec, arguments.images[0], variant.method, block=block, keep_rate=rate, scale=arguments.scale)
    save_animation(frames, output)
