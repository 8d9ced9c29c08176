"""Rows of titled panels on one sheet, pixel for pixel: nothing is resampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

_PAPER, _INK = "white", (35, 35, 35)


@dataclass(frozen=True)
class Panel:
    """pixels: (H, W, 3)."""

    pixels: NDArray[np.uint8]
    title: str


@dataclass(frozen=True)
class Row:
    """name: written up the left side; rows without names leave no room for them."""

    panels: Sequence[Panel]
    name: str = ""


def compose(rows: Sequence[Row]) -> Image:
    """The sheet. All panels must have one size; rows may have different numbers of them."""
    from PIL import Image, ImageDraw, ImageFont

    if not rows or not any(row.panels for row in rows):
        raise ValueError("there is nothing to draw")
    height, width = rows[0].panels[0].pixels.shape[:2]
    text_height = max(12, min(height, width) // 16)
    font = ImageFont.load_default(text_height)
    gap = text_height // 2
    titles = text_height * 7 // 4
    names = titles if any(row.name for row in rows) else 0

    columns = max(len(row.panels) for row in rows)
    across = names + columns * (width + gap) + gap
    down = len(rows) * (titles + height) + gap
    sheet = Image.new("RGB", (across, down), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        top = number * (titles + height) + titles
        if row.name:
            sheet.paste(_sideways(row.name, font, height, names), (gap // 2, top))
        for column, panel in enumerate(row.panels):
            left = names + gap + column * (width + gap)
            sheet.paste(Image.fromarray(panel.pixels), (left, top))
            pen.text((left + width // 2, top - gap // 2), panel.title, font=font, fill=_INK, anchor="md")
    return sheet


def _sideways(text: str, font: object, length: int, breadth: int) -> Image:
    """Text written upwards, centred on a strip of its own."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (length, breadth), _PAPER)
    ImageDraw.Draw(strip).text((length // 2, breadth // 2), text, font=font, fill=_INK, anchor="mm")  # type: ignore[arg-type]
    return strip.transpose(Image.Transpose.ROTATE_90)
