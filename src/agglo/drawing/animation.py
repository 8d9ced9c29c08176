"""A picture that dissolves into its groups, as an animated file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agglo.drawing.groups import Ints, Pixels, draw_groups, enlarged
from agglo.drawing.sheet import Panel, Row, compose

if TYPE_CHECKING:
    from PIL.Image import Image

ANIMATED = (".gif", ".webp")
_STEP, _REST = 220, 2200  # milliseconds of a frame, and of the first and the last
_COLOURS = 128
_LEAST_WASH, _MOST_WASH = 0.25, 0.9


@dataclass(frozen=True)
class Cut:
    """One frame. labels: the group of every patch, (h, w), named by first members. title, caption: above and below."""

    labels: Ints
    title: str
    caption: str = ""


def counts_between(most: int, fewest: int, steps: int) -> list[int]:
    """Numbers of groups that fall by the same fraction from frame to frame, each one once; the first is not `most`.

    >>> counts_between(16, 2, 3)
    [8, 4, 2]
    """
    if not 1 <= fewest < most or steps < 1:
        raise ValueError(f"{steps} steps from {most} to {fewest} groups: at least 1 step to fewer groups is needed")
    wanted = [round(most * (fewest / most) ** (step / steps)) for step in range(1, steps + 1)]
    return list(dict.fromkeys(count for count in wanted if count < most))


def dissolve(picture: Pixels, cuts: Sequence[Cut], *, first: Cut, scale: int = 2) -> list[Image]:
    """The frames: the picture (H, W, 3) as it is with the text of `first`, then every cut, with less and less photo."""
    frames = [_frame(enlarged(picture, scale), first)]
    for wash, cut in zip(np.linspace(_LEAST_WASH, _MOST_WASH, len(cuts)), cuts, strict=True):
        frames.append(_frame(draw_groups(picture, cut.labels, scale=scale, wash=float(wash)), cut))
    height = max(frame.height for frame in frames)
    return [_padded(frame, height) for frame in frames]


def save_animation(frames: Sequence[Image], path: Path) -> None:
    """All frames in one file that starts over at its end: .gif or .webp."""
    if path.suffix.lower() not in ANIMATED:
        raise ValueError(f"output={str(path)!r} is no animation; accepted: {', '.join(ANIMATED)}")
    times = [_REST, *[_STEP] * (len(frames) - 2), _REST]
    options: dict[str, Any] = {"quality": 80, "method": 4}
    images = list(frames)
    if path.suffix.lower() == ".gif":
        options = {"optimize": True, "disposal": 1}
        images = [_of_few_colours(frame) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=times, loop=0, **options)


def _frame(pixels: Pixels, cut: Cut) -> Image:
    return compose([Row([Panel(pixels, cut.title, cut.caption)])])


def _padded(frame: Image, height: int) -> Image:
    """Captions may take one line or two; frames of an animation have one size."""
    from PIL import Image

    if frame.height == height:
        return frame
    sheet = Image.new("RGB", (frame.width, height), "white")
    sheet.paste(frame)
    return sheet


def _of_few_colours(frame: Image) -> Image:
    """Fewer colours than a GIF can have, and no dither: photographs make large GIFs."""
    from PIL import Image

    return frame.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
