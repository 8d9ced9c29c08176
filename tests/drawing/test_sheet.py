"""Sheets: every panel whole, every word on them, whatever the names are."""

from __future__ import annotations

import numpy as np
import pytest

from agglo.drawing.sheet import Panel, Row, compose, wrapped

ImageFont = pytest.importorskip("PIL.ImageFont")


def panel(colour: int, title: str = "title", caption: str = "") -> Panel:
    return Panel(np.broadcast_to(np.array(pixel(colour), dtype=np.uint8), (60, 80, 3)), title, caption)


def pixel(colour: int) -> list[int]:
    """Not grey, as text is."""
    return [colour, 200, 0]


@pytest.mark.parametrize("width", [40, 300])
@pytest.mark.parametrize(
    "text", ["", "short", "a few words of ordinary length and some more", "n01440764_" * 12, "a " + "b" * 60 + " c"]
)
def test_wrapped_text_fits_and_loses_nothing(text: str, width: int) -> None:
    font = ImageFont.load_default(14)
    lines = wrapped(text, width, font)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(font.getlength(line) <= width for line in lines)
    if max(map(font.getlength, text.split()), default=0) <= width:
        assert " ".join(lines) == " ".join(text.split())


def test_long_names_make_room_for_themselves_and_cover_no_panel() -> None:
    long = "a_very_long_name_of_a_file_that_somebody_gave_without_a_thought_" * 3
    rows = [Row([panel(10), panel(20, long, long)], long + ".jpg"), Row([panel(30), panel(40)], "b.jpg")]
    sheet = np.asarray(compose(rows))
    for colour in (10, 20, 30, 40):
        ys, xs = np.nonzero((sheet == pixel(colour)).all(axis=-1))
        assert (np.ptp(ys) + 1, np.ptp(xs) + 1) == (60, 80)
        assert (sheet[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1] == pixel(colour)).all()
    short = compose([Row([panel(10), panel(20)], "a.jpg"), Row([panel(30), panel(40)], "b.jpg")])
    assert sheet.shape[0] > short.height and sheet.shape[1] == short.width
    with pytest.raises(ValueError, match="one size"):
        compose([Row([panel(10), Panel(np.zeros((5, 5, 3), dtype=np.uint8), "x")])])
