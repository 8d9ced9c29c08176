"""Pictures that come with agglo, by name: garments, scenes made of them, and a photograph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agglo.embedded import classifier as embedded
from agglo.experiments.fashion_mnist import read_split
from agglo.experiments.image_files import open_image
from agglo.playground.uploads import decoded

if TYPE_CHECKING:
    from PIL.Image import Image

_PREFIX = "example:"
# Number in the test set. Of the first 300 under a threshold of 0.1, this bag keeps fewest tokens and this shirt most.
_GARMENTS = {"bag": 105, "shirt": 135, "boot": 0, "pullover": 1, "trousers": 2, "dress": 13, "sandal": 82}
EASY, HARD, FIRST = (_PREFIX + name for name in ("bag", "shirt", "boot"))
PHOTO = f"{_PREFIX}pagoda"
_SCENES = {f"scene {number + 1}": number for number in range(4)}
_SCENE_SIDE = 112


@dataclass(frozen=True)
class Example:
    """value: what a visitor's request says instead of a picture. title: for people."""

    value: str
    title: str
    image: Image


@cache
def single_things() -> tuple[Example, ...]:
    """For a classifier: garments, and the photograph."""
    images, _ = read_split(embedded.IMAGES, "val")
    garments = [_example(name, _grey(images[number])) for name, number in _GARMENTS.items()]
    return (*garments, _example("pagoda", open_image(embedded.PHOTO)))


@cache
def scenes() -> tuple[Example, ...]:
    """For a detector: garments lying about, and the photograph."""
    from agglo.detection.data.scenes import make_scenes

    made = make_scenes(embedded.IMAGES, len(_SCENES), seed=0, split="val", size=_SCENE_SIDE)
    drawn = [_example(name, _grey(made.scene(number).pixels)) for name, number in _SCENES.items()]
    return (*drawn, _example("pagoda", open_image(embedded.PHOTO)))


def picture(value: str) -> Image:
    """What a visitor chose: an example by its value, or the picture in a data URL. ValueError says what is wrong."""
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return decoded(value if isinstance(value, str) else "")
    known = {example.value: example for example in (*single_things(), *scenes())}
    if value not in known:
        names = ", ".join(name.removeprefix(_PREFIX) for name in known)
        raise ValueError(f"There is no example {value.removeprefix(_PREFIX)[:40]!r}; there are {names}.")
    return known[value].image


def _example(name: str, image: Image) -> Example:
    return Example(_PREFIX + name, name, image)


def _grey(pixels: NDArray[np.uint8]) -> Image:
    from PIL import Image

    return Image.fromarray(pixels).convert("RGB")
