"""Rows of titled panels on one sheet. Text is wrapped to the room it has, never cut; panels are pasted as they are."""

from __future__ import annotations

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


@dataclass(frozen=True)
class _Layout:
    """A row with its texts wrapped into lines."""

    row: Row
    name: list[str]
    titles: list[list[str]]
    captions: list[list[str]]


def compose(rows: Sequence[Row]) -> Image:
    """Lay rows out on one sheet. All panels must have one size; rows may have different numbers of them."""
    from PIL import Image, ImageDraw

    if not rows or not any(row.panels for row in rows):
        raise ValueError("there is nothing to draw")
    sizes = {panel.pixels.shape[:2] for row in rows for panel in row.panels}
    if len(sizes) > 1:
        raise ValueError(f"panels of one sheet must have one size, got {sorted(sizes)}")
    [(height, width)] = sizes
    text = _Text(max(12, min(height, width) // 20))
    gap = text.size
    across = max(len(row.panels) for row in rows) * (width + gap) + gap
    layouts = [
        _Layout(
            row,
            text.wrapped(row.name, across - 2 * gap),
            [text.wrapped(panel.title, width) for panel in row.panels],
            [text.wrapped(panel.caption, width) for panel in row.panels],
        )
        for row in rows
    ]
    tops, top = [], 0
    for layout in layouts:
        tops.append(top)
        lines = len(layout.name) + max(map(len, layout.titles)) + max(map(len, layout.captions))
        top += gap + lines * text.line + height
    sheet = Image.new("RGB", (across, top + gap), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for layout, top in zip(layouts, tops, strict=True):
        text.write(pen, layout.name, (gap, top + gap // 2), _INK, anchor="la")
        titles_end = top + gap + (len(layout.name) + max(map(len, layout.titles))) * text.line
        for column, panel in enumerate(layout.row.panels):
            left = gap + column * (width + gap)
            middle = left + width // 2
            title, caption = layout.titles[column], layout.captions[column]
            text.write(pen, title, (middle, titles_end - len(title) * text.line - gap // 4), _INK)
            sheet.paste(Image.fromarray(panel.pixels), (left, titles_end))
            text.write(pen, caption, (middle, titles_end + height + gap // 4), _PALE_INK)
    return sheet


class _Text:
    """A font that wraps and writes text."""

    def __init__(self, size: int) -> None:
        from PIL import ImageFont

        self.size = size
        self.line = size * 5 // 4
        self.font: Any = ImageFont.load_default(size)

    def wrapped(self, text: str, width: int) -> list[str]:
        """Return lines no wider than that, broken between words where possible; words that are too long are broken."""
        lines: list[str] = []
        for word in text.split():
            if lines and self._fits(f"{lines[-1]} {word}", width):
                lines[-1] = f"{lines[-1]} {word}"
                continue
            lines += self._broken(word, width)
        return lines

    def _broken(self, word: str, width: int) -> list[str]:
        """Return a word in as many pieces as it needs, with at least one letter each."""
        pieces = [""]
        for letter in word:
            if pieces[-1] and not self._fits(pieces[-1] + letter, width):
                pieces.append("")
            pieces[-1] += letter
        return pieces

    def write(
        self, pen: Any, lines: Sequence[str], corner: tuple[int, int], colour: tuple[int, int, int], anchor: str = "ma"
    ) -> None:
        """Write lines to the right of a corner, anchor "la", or centred on it, "ma"."""
        for number, line in enumerate(lines):
            pen.text((corner[0], corner[1] + number * self.line), line, font=self.font, fill=colour, anchor=anchor)

    def _fits(self, text: str, width: int) -> bool:
        return bool(self.font.getlength(text) <= width)
