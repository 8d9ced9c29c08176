"""Labels on an image that keep out of each other's way, and hide none of the objects that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom

_OF_TAG, _OF_BOX = 0.05, 0.3  # at most: of a label covered by others, of any box covered by a label
_DARK, _LIGHT = (20, 20, 20), (255, 255, 255)


@dataclass(frozen=True)
class Tag:
    """A label for a box, in a colour."""

    text: str
    box: tuple[float, ...]
    colour: tuple[int, int, int]


def text_size(shape: Sequence[int]) -> int:
    """Return the size of text in pixels for an image of a shape."""
    return int(max(10, min(22, min(shape[:2]) // 36)))


def draw_tags(pixels: Pixels, tags: Sequence[Tag], size: int) -> tuple[Pixels, int]:
    """Draw labels, the first ones having the choice of positions; empty texts are not written.

    Returns:
        The image with the labels, and how many found no position.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(pixels)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    boxes = np.array([tag.box for tag in tags]).reshape(-1, 4)
    tags = [tag for tag in tags if tag.text]
    taken = np.zeros((0, 4))
    pad = max(2, size // 5)
    for tag in tags:
        width, height = font.getlength(tag.text) + 2 * pad, size + pad
        position = _position(tag.box, (width, height), pixels.shape, taken, boxes)
        if position is None:
            continue
        taken = np.concatenate([taken, [position]])
        pen.rounded_rectangle(position, radius=max(1, pad // 2), fill=tag.colour)
        pen.text(
            (position[0] + pad, (position[1] + position[3]) / 2),
            tag.text,
            font=font,
            fill=_ink(tag.colour),
            anchor="lm",
        )
    return np.array(image), len(tags) - len(taken)


def _ink(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a dark colour for light ones, a light one for dark ones."""
    red, green, blue = colour
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _LIGHT


def _position(
    box: tuple[float, ...], size: tuple[float, float], shape: Sequence[int], taken: Floats, boxes: Floats
) -> Rectangle | None:
    """Return the first position where a label covers little of other labels and of the boxes; None if there is none."""
    width, height = size
    if width >= shape[1] or height >= shape[0]:
        return None
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for left, top in _corners(box, width, height):
        left, top = min(max(left, 0.0), shape[1] - 1 - width), min(max(top, 0.0), shape[0] - 1 - height)
        position = (left, top, left + width, top + height)
        if (
            _common(position, taken).sum() <= _OF_TAG * width * height
            and (_common(position, boxes) <= _OF_BOX * areas).all()
        ):
            return position
    return None


def _corners(box: tuple[float, ...], width: float, height: float) -> Iterator[tuple[float, float]]:
    """Yield positions, the best first: above the box, inside it, below it; at the left, then at the right."""
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
    """Return the area that a rectangle has in common with each of several (n, 4)."""
    across = np.minimum(one[2], others[:, 2]) - np.maximum(one[0], others[:, 0])
    down = np.minimum(one[3], others[:, 3]) - np.maximum(one[1], others[:, 1])
    return across.clip(min=0) * down.clip(min=0)
