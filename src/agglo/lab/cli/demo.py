"""Evaluate a small model that comes with agglo, dense and reduced: accuracy, speed and groups.

Evaluates a classifier as it is, with ToMe and with ATC (single, average, complete linkage) at keep rates 0.9, 0.7, 0.5
and 0.25, none of it trained for fewer tokens. Without arguments that is the model that comes with agglo, a vision
transformer of 12 blocks and 196 patches for Fashion-MNIST, on the first 1000 images of its test set, which takes a
minute or two on two cores; --data takes all 10 000, from a folder of Fashion-MNIST (Debian: dataset-fashion-mnist).
Prints a table, writes a plot of accuracy and speed, an image of the groups, and a colour photo in groups. The model
that comes with agglo sees no colours: it leaves the photo to the clustering alone. Where diffusers is installed, the
diffusion model that comes with agglo draws clothes from the same noise dense, with ToMe and with ATC. With --model and
--photo, and without --data, only the photo is drawn, in the model's own groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agglo.embedded.classifier import IMAGES, PHOTO
from agglo.lab.demo import show, show_generated, show_photo, summary
from agglo.lab.options import EMBEDDED, AtLeastOne, ModelOptions, option

EXAMPLES = """\
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
  agglo visualize --help        the groups of your images, still or moving
or in Python: agglo.apply(model, keep_rate=0.5)"""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What to show."""

    data: Path | None = option(None, "folder of a data set (default: Fashion-MNIST)", metavar="DIR")
    images: AtLeastOne | None = option(None, "only N images, evenly spread (default: all)")
    photo: Path | None = option(None, "a colour photo to draw (default: one in agglo)")
    output: Path = option(Path("demo-output"), "where to write", metavar="DIR")
    model: str | None = option(None, f"{ModelOptions.MODEL_HELP} (default: the one in agglo)", group=ModelOptions.GROUP)


def run(options: Options) -> None:
    spec = options.trained_spec()
    is_embedded = spec == EMBEDDED
    if not is_embedded and options.data is None and options.photo is None:
        raise ValueError(f"--model {options.model} needs --data, a folder of images it can classify, or --photo")
    show_photo(spec, options.photo or PHOTO, options.output)
    written = ["photo.png"]
    if is_embedded or options.data is not None:
        print(f"\n{summary(show(spec, options.data or IMAGES, options.output, images=options.images))}\n")
        written += ["accuracy.png", "groups.png", "results.json"]
    if is_embedded and find_spec("diffusers") is not None:  # which has the generator's class
        show_generated(options.output)
        written.append("generated.png")
    for name in written:
        print(f"{options.output / name}: {_FILES[name]}")
    print(f"\n{_NEXT}")
