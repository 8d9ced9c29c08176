"""Rows of titled panels on one sheet. Text is wrapped to the room it has, never cut; panels are pasted as they are."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

_PAPER, _INK, _PALE_INK = (255, 255, 255), (35, 35, 35), (105, 105, 105)


@dataclass(frozen=True)
class Panel:
    """An image with a title above it and a caption below."""

    pixels: NDArray[np.uint8]  # (H, W, 3)
    title: str
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """Panels side by side, with a name above all of them."""

    panels: Sequence[Panel]
    name: str = ""


def compose(rows: Sequence[Row]) -> Image:
    """Lay rows out on one sheet. All panels must have one size; rows may have different numbers of them."""
    from PIL import Image, ImageDraw, ImageFont

    if not any(row.panels for row in rows):
        raise ValueError("there is nothing to draw")
    sizes = {panel.pixels.shape[:2] for row in rows for panel in row.panels}
    if len(sizes) > 1:
        raise ValueError(f"panels of one sheet must have one size, got {sorted(sizes)}")
    [(height, width)] = sizes
    gap = max(12, min(height, width) // 20)  # also the size of the text
    font, line = ImageFont.load_default(gap), gap * 5 // 4
    across = max(len(row.panels) for row in rows) * (width + gap) + gap
    names = [wrapped(row.name, across - 2 * gap, font) for row in rows]
    titles = [[wrapped(panel.title, width, font) for panel in row.panels] for row in rows]
    captions = [[wrapped(panel.caption, width, font) for panel in row.panels] for row in rows]
    above = [gap + (len(name) + max(map(len, title))) * line for name, title in zip(names, titles, strict=True)]
    heights = [top + height + max(map(len, caption)) * line for top, caption in zip(above, captions, strict=True)]
    sheet = Image.new("RGB", (across, sum(heights) + gap), _PAPER)
    pen: Any = ImageDraw.Draw(sheet)

    def write(lines: Sequence[str], x: int, y: int, colour: tuple[int, int, int], anchor: str = "ma") -> None:
        for number, text in enumerate(lines):
            pen.text((x, y + number * line), text, font=font, fill=colour, anchor=anchor)

    for number, row in enumerate(rows):
        top = sum(heights[:number])
        write(names[number], gap, top + gap // 2, _INK, anchor="la")
        begin = top + above[number]
        for column, panel in enumerate(row.panels):
            left = gap + column * (width + gap)
            title = titles[number][column]
            write(title, left + width // 2, begin - len(title) * line - gap // 4, _INK)
            sheet.paste(Image.fromarray(panel.pixels), (left, begin))
            write(captions[number][column], left + width // 2, begin + height + gap // 4, _PALE_INK)
    return sheet


def wrapped(text: str, width: int, font: Any) -> list[str]:
    """Return lines no wider than that many pixels, broken between words unless a word is too long."""
    for letters in range(len(text), 0, -1):
        lines = textwrap.wrap(text, letters)
        if all(font.getlength(line) <= width for line in lines):
            return lines
    return textwrap.wrap(text, 1)
