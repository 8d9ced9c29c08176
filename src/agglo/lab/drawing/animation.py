"""An image that dissolves into its groups, as an animated file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agglo.drawing.groups import Ints, Pixels, draw_groups, enlarged
from agglo.drawing.sheet import Panel, Row, compose

if TYPE_CHECKING:
    from PIL.Image import Image

_STEP, _REST = 220, 2200  # milliseconds of a frame, and of the first and the last
_LEAST_WASH, _MOST_WASH = 0.25, 0.9


@dataclass(frozen=True)
class Cut:
    """One frame, with a title above it and a caption below."""

    labels: Ints  # the group of every patch, (h, w), named by first members
    title: str
    caption: str = ""


def counts_between(most: int, fewest: int, steps: int) -> list[int]:
    """Return numbers of groups that fall by the same fraction from frame to frame, each once, without `most`.

    >>> counts_between(16, 2, 3)
    [8, 4, 2]
    """
    if not 1 <= fewest < most or steps < 1:
        raise ValueError(f"{steps} steps from {most} to {fewest} groups: at least 1 step to fewer groups is needed")
    wanted = [round(most * (fewest / most) ** (step / steps)) for step in range(1, steps + 1)]
    return list(dict.fromkeys(count for count in wanted if count < most))


def dissolve(image: Pixels, cuts: Sequence[Cut], *, first: Cut, scale: int = 2) -> list[Image]:
    """Return frames of one size: the image (H, W, 3) with the text of `first`, then every cut, with ever less photo."""
    from PIL import ImageOps

    washes = np.linspace(_LEAST_WASH, _MOST_WASH, len(cuts))
    drawn = [draw_groups(image, cut.labels, scale=scale, wash=wash) for cut, wash in zip(cuts, washes, strict=True)]
    shown = zip([enlarged(image, scale), *drawn], [first, *cuts], strict=True)
    frames = [compose([Row([Panel(pixels, cut.title, cut.caption)])]) for pixels, cut in shown]
    height = max(frame.height for frame in frames)  # captions may take one line or two
    return [ImageOps.expand(frame, (0, 0, 0, height - frame.height), "white") for frame in frames]


def save_animation(frames: Sequence[Image], path: Path) -> None:
    """Save frames as a .gif that starts over at its end."""
    from PIL import Image

    # Photographs make large GIFs: fewer colours than it can have, and no dither.
    first, *rest = (frame.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE) for frame in frames)
    times = [_REST, *[_STEP] * (len(frames) - 2), _REST]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=True, disposal=1)
