"""Names on a picture that keep out of each other's way, and hide none of the things that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom

_OF_TAG, _OF_BOX = 0.05, 0.3  # at most: of a tag covered by others, of any box covered by a tag
_DARK, _LIGHT = (20, 20, 20), (255, 255, 255)


@dataclass(frozen=True)
class Tag:
    """A text for a box, in a colour."""

    text: str
    box: tuple[float, ...]
    colour: tuple[int, int, int]


def text_size(shape: Sequence[int]) -> int:
    """In pixels, for a picture of that shape."""
    return int(max(10, min(22, min(shape[:2]) // 36)))


def draw_tags(picture: Pixels, tags: Sequence[Tag], size: int) -> tuple[Pixels, int]:
    """The picture with the tags, the first ones having the choice of places; and how many found none. Empty texts are
    not written."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(picture)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    boxes = np.array([tag.box for tag in tags]).reshape(-1, 4)
    tags = [tag for tag in tags if tag.text]
    taken = np.zeros((0, 4))
    pad = max(2, size // 5)
    for tag in tags:
        width, height = font.getlength(tag.text) + 2 * pad, size + pad
        place = _place(tag.box, (width, height), picture.shape, taken, boxes)
        if place is None:
            continue
        taken = np.concatenate([taken, [place]])
        pen.rounded_rectangle(place, radius=max(1, pad // 2), fill=tag.colour)
        pen.text((place[0] + pad, (place[1] + place[3]) / 2), tag.text, font=font, fill=_ink(tag.colour), anchor="lm")
    return np.array(image), len(tags) - len(taken)


def _ink(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Dark on light colours, light on dark ones."""
    red, green, blue = colour
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _LIGHT


def _place(
    box: tuple[float, ...], size: tuple[float, float], shape: Sequence[int], taken: Floats, boxes: Floats
) -> Rectangle | None:
    """The first place where a tag covers little of the other tags and of the boxes; None if there is none."""
    width, height = size
    if width >= shape[1] or height >= shape[0]:
        return None
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for left, top in _corners(box, width, height):
        left, top = min(max(left, 0.0), shape[1] - 1 - width), min(max(top, 0.0), shape[0] - 1 - height)
        place = (left, top, left + width, top + height)
        if _common(place, taken).sum() <= _OF_TAG * width * height and (_common(place, boxes) <= _OF_BOX * areas).all():
            return place
    return None


def _corners(box: tuple[float, ...], width: float, height: float) -> Iterator[tuple[float, float]]:
    """Places for a tag, the best first: above its box, inside it, below it; at the left, then at the right."""
    left, top, right, bottom = box
    for across in (left, right - width):
        if top >= height:
            yield across, top - height
        yield across, top
    for across in (left, right - width):
        yield across, bottom - height
        yield across, bottom
    yield (left + right - width) / 2, (top + bottom - height) / 2


def _common(one: Rectangle, others: Floats) -> Floats:
    """The area that a rectangle has in common with each of several (n, 4)."""
    across = np.minimum(one[2], others[:, 2]) - np.maximum(one[0], others[:, 0])
    down = np.minimum(one[3], others[:, 3]) - np.maximum(one[1], others[:, 1])
    return across.clip(min=0) * down.clip(min=0)
