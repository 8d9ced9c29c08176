"""Draw which patches of an image are merged into which groups, stage by stage.

Each image has a row: the crop the model saw, then its groups, each washed in its mean colour, with the model's first
answer below, dense and reduced. One method shows its groups after every stage; several methods, linkages or budgets
stand side by side, each with its groups after the last stage.

To a .gif file: one image that dissolves into its groups, the cuts of the tree over its tokens at one block, which
--blocks names (default: at a quarter of the depth); --keep-rate says where it ends (default: with 12 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agglo.lab.cli.arguments import ReductionOptions
from agglo.lab.data.image_files import require_image_name
from agglo.lab.drawing.animation import save_animation
from agglo.lab.options import AtLeastOne, Whole, ZeroShotOptions, option
from agglo.lab.tasks.classification.evaluation.figures import animate, visualize

EXAMPLES = """\
examples:
  agglo visualize cat.jpg --checkpoint deit_tiny.safetensors -o cat.png
  agglo visualize cat.jpg --pretrained -o cat.gif
  agglo visualize cat.jpg --pretrained --linkage single average complete --keep-rate 0.25 -o linkages.png
  agglo visualize cat.jpg --pretrained --method atc tome --keep-rate 0.5 -o methods.png
  agglo visualize cat.jpg --pretrained --schedule 'stages:0.5,blocks=[4,8]' linear:16 -o schedules.png
  agglo visualize cat.jpg --model hf:my-vit --keep-rate 0.25 -o mine.png
  agglo visualize cat.jpg --model open_clip:ViT-B-32:openai --zero-shot --class-names animals.txt -o clip.png
  agglo visualize cat.jpg --pretrained --threshold 0.1 --blocks 4 8 -o dynamic.png
"""


@dataclass(frozen=True, kw_only=True)
class Options(ZeroShotOptions, ReductionOptions):
    """What to draw."""

    images: Sequence[Path] = option(help="one or more image files", positional=True, metavar="IMAGE")
    output: Path = option(help="what to write: .png, .jpg, .webp; .gif moves", flags=("-o", "--output"))
    scale: AtLeastOne = option(2, "enlarge N times")
    after: Whole | None = option(None, "groups as they are after block B (default: after the last stage)", metavar="B")


def run(options: Options) -> None:
    output = require_image_name(options.output)
    configs = options.configs([0.5])
    if output.suffix.lower() != ".gif":
        spec = options.trained_spec()
        visualize(spec, options.images, configs, after=options.after, scale=options.scale).save(output)
        print(output)
        return
    what = f"output={str(output)!r} is an animation"
    for given, number in (("images", len(options.images)), ("methods or keep rates", len(configs))):
        if number > 1:
            raise ValueError(f"{what} of one image and one method, not of {number} {given}")
    if options.threshold or options.schedule or options.after is not None or len(options.blocks or [0]) > 1:
        raise ValueError(f"{what}: it takes --keep-rate and one block, not --threshold, --schedule or --after")
    frames = animate(
        options.trained_spec(),
        options.images[0],
        next(iter(configs)).create_method(),
        block=options.blocks[0] if options.blocks else None,
        keep_rate=options.keep_rate[0] if options.keep_rate else None,
        scale=options.scale,
    )
    save_animation(frames, output)
    print(output)
