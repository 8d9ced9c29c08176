"""agglo demo"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agglo.cli.arguments import add_command, add_model, model_spec, positive

_ABOUT = "see it work: accuracy, speed and groups of a small model that comes with agglo"

_DETAILS = """\
Evaluates a classifier as it is, with ToMe and with ATC (single, average, complete linkage) at keep rates 0.9, 0.7, 0.5
and 0.25, none of it trained for fewer tokens. Without arguments that is the model that comes with agglo, a vision
transformer of 12 blocks and 196 patches for Fashion-MNIST, on the first 1000 images of its test set, which takes a
minute or two on two cores; --data takes all 10 000, from a folder of Fashion-MNIST (Debian: dataset-fashion-mnist).
Prints a table, writes a plot of accuracy and speed, a picture of the groups, and a colour photo in groups. The model
that comes with agglo sees no colours: it leaves the photo to the clustering alone. Where diffusers is installed, the
diffusion model that comes with agglo draws clothes from the same noise dense, with ToMe and with ATC. With --model and
--photo, and without --data, only the photo is drawn, in the model's own groups.
"""

_EXAMPLES = """\
examples:
  agglo demo
  agglo demo --data /usr/share/datasets/fashion-mnist --output full
  agglo demo --model deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --photo cat.jpg
  agglo demo --model deit_tiny_patch16_224 --checkpoint deit_tiny.safetensors --data imagenet --images 1000
"""

_FILES = {
    "accuracy.png": "accuracy against keep rate and speed",
    "groups.png": "which patches were merged",
    "photo.png": "a colour photo in groups",
    "generated.png": "clothes by a diffusion model, dense and with half of its tokens",
    "results.json": "every number",
}

_NEXT = """\
Next, for a model and data of your own:
  agglo demo --model deit_tiny_patch16_224 --checkpoint F --data DIR
  agglo evaluate --help         any model, method and keep rate
  agglo bench model --help      speed, against the ceiling where reduction is free
  agglo visualize --help        the groups of your pictures, still or moving
or in Python: agglo.apply(model, keep_rate=0.5)"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "demo", about=_ABOUT, details=_DETAILS, examples=_EXAMPLES)
    add_model(parser, default=None)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of a data set (default: Fashion-MNIST)")
    parser.add_argument("--images", type=positive, metavar="N", help="only N images, evenly spread (default: all)")
    parser.add_argument("--photo", type=Path, metavar="F", help="a colour photo to draw (default: one in agglo)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where to write (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from agglo.demo.generated import can_generate, show_generated
    from agglo.demo.show import EMBEDDED, show, show_photo
    from agglo.demo.summary import summary
    from agglo.embedded.classifier import IMAGES, PHOTO

    is_own = arguments.model is None
    if is_own and (arguments.checkpoint or arguments.pretrained or arguments.image_size or arguments.num_classes):
        raise ValueError("--checkpoint, --pretrained, --image-size and --num-classes need --model")
    if not is_own and arguments.data is None and arguments.photo is None:
        raise ValueError(f"--model {arguments.model} needs --data, a folder of images it can classify, or --photo")
    spec = EMBEDDED if is_own else model_spec(arguments)
    if spec.has_random_weights:
        print("agglo: weights are random, and so are the answers; give --checkpoint or --pretrained", file=sys.stderr)
    show_photo(spec, arguments.photo or PHOTO, arguments.output)
    if is_own or arguments.data is not None:
        data = arguments.data or IMAGES
        print(f"\n{summary(show(spec, data, arguments.output, images=arguments.images))}\n")
        written = list(_FILES)
        if is_own and can_generate():
            show_generated(arguments.output)
        else:
            written.remove("generated.png")
    else:
        written = ["photo.png"]
    for name in written:
        print(f"{arguments.output / name}: {_FILES[name]}")
    print(f"\n{_NEXT}")
