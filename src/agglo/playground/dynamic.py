"""A threshold instead of a keep rate: every picture keeps as many tokens as it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agglo.playground.classifiers import Classifier
from agglo.playground.settings import choose
from agglo.playground.tokens import Compared, compare

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Thresholded:
    """line: of Python, the same for all pictures. pictures: each on its own, with its one side."""

    line: str
    pictures: list[Compared]


def threshold(classifier: Classifier, images: list[Image], distance: float, linkage: str) -> Thresholded:
    """ATC up to a cosine distance on each picture. They run one by one, so that each shows its own time."""
    chosen = choose("atc", linkage, threshold=distance)
    return Thresholded(chosen.line, [compare(classifier, image, [chosen]) for image in images])
