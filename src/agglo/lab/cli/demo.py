"""Evaluate a small model that comes with agglo, dense and reduced: accuracy, speed and groups.

Evaluates a vision transformer of 12 blocks and 196 patches for Fashion-MNIST, which comes with agglo, as it is, with
ToMe and with ATC (single, average, complete linkage) at keep rates 0.9, 0.7, 0.5 and 0.25, none of it trained for fewer
tokens, on the first 1000 images of the test set: a minute or two on two cores. Prints a table, writes a plot of
accuracy and speed, an image of the groups, and a colour photo whose patches are clustered by their colours, without a
model. Where diffusers is installed, the diffusion model that comes with agglo draws clothes from the same noise dense,
with ToMe and with ATC.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agglo.lab.demo import draw_photo, show, show_generated, summary
from agglo.lab.options import AtLeastOne, option

_NEXT = """\
Next, for a model and data of your own:
  agglo evaluate --help         accuracy and speed of any model, method and keep rate
  agglo bench model --help      speed, against the ceiling where reduction is free
  agglo visualize --help        the groups of your images, still or moving
or in Python: agglo.apply(model, keep_rate=0.5)"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    images: AtLeastOne | None = option(None, "only N images, evenly spread (default: all)")
    output: Path = option(Path("demo-output"), "where to write", metavar="DIR")


def run(options: Options) -> None:
    output = options.output
    print(f"\n{summary(show(output, images=options.images))}\n")
    draw_photo().save(output / "photo.png")
    print(f"{output / 'accuracy.png'}: accuracy against keep rate and speed")
    print(f"{output / 'groups.png'}: which patches were merged")
    print(f"{output / 'results.json'}: every number")
    print(f"{output / 'photo.png'}: a colour photo in groups")
    if find_spec("diffusers") is not None:  # which has the generator's class
        show_generated(output)
        print(f"{output / 'generated.png'}: clothes by a diffusion model, dense and with half of its tokens")
    print(f"\n{_NEXT}")
