"""Objects drawn over an image: tinted masks with an outline, boxes, names and scores.

drawn = draw_detections(image, detections, data.classes)
sheet(image, [Shown("dense", dense), Shown("atc, keep rate 0.5", reduced, labels)], data.classes).save("both.png")
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agglo.drawing.groups import Ints, Pixels, count_groups, draw_groups, enlarged, tokens
from agglo.drawing.sheet import Panel, Row, compose

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]
Detections = Mapping[str, Any]

WASH, _THIN_WASH = 0.4, 0.15  # how much of an object's colour lies over the photo; less where models draw over another
LEAST_SCORE = 0.3

# Hues in turns of the colour wheel, neighbours far apart: classes of an image take them in their order.
_HUES = (0.58, 0.08, 0.83, 0.36, 0.0, 0.5, 0.15, 0.7, 0.92, 0.26)
_LIGHTNESS = (0.55, 0.7, 0.44)  # of objects of one class, in turns


class Drawn(NamedTuple):
    """An image (H, W, 3) with its objects, and a caption such as "3 objects"."""

    pixels: Pixels
    summary: str


def draw_detections(
    image: Pixels,
    detections: Detections,
    classes: Sequence[str],
    *,
    scale: int = 1,
    least: float = LEAST_SCORE,
    present: Sequence[int] | None = None,
) -> Drawn:
    """Draw objects over an image (H, W, 3), `scale` times larger.

    Args:
        image: Bytes.
        detections: Boxes (n, 4) xyxy in pixels of the image, labels (n,) from 0; scores (n,) and masks (n, H, W) if
            there are any. What a detector returns, or the target of a data set.
        classes: The name of each label.
        scale: A whole number.
        least: Objects with a lower score are left out.
        present: Labels that colours are given to, so that several drawings agree; None is the ones drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    found = {name: _array(values) for name, values in detections.items() if name in ("boxes", "labels", "masks")}
    names = [classes[label] for label in found["labels"]]
    if "scores" in detections:
        scores = _array(detections["scores"])
        names = [f"{name} {score:.2f}" for name, score in zip(names, scores, strict=True) if score >= least]
        found = {name: values[scores >= least] for name, values in found.items()}
    boxes, labels = found["boxes"].reshape(-1, 4) * scale, found["labels"].tolist()
    colours = _colours(labels, labels if present is None else present)
    drawn = enlarged(image, scale).copy()
    thickness = max(1, round(min(drawn.shape[:2]) / 300))
    _draw_objects(drawn, boxes, found.get("masks"), colours, thickness)
    canvas = Image.fromarray(drawn)
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(max(10, min(22, min(drawn.shape[:2]) // 36)))
    for name, box, colour in zip(names, boxes, colours, strict=True):
        corner = (max(0, box[0]), max(0, box[1]))
        pen.rectangle(pen.textbbox(corner, name, font=font), fill=colour)
        pen.text(corner, name, font=font, fill="black" if sum(colour) > 380 else "white")
    return Drawn(np.array(canvas), f"{len(boxes)} object{'' if len(boxes) == 1 else 's'}")


def draw_over_one_another(image: Pixels, layers: Sequence[tuple[Detections, Colour]], *, scale: int = 1) -> Pixels:
    """Draw the detections of several models over one image (H, W, 3), each model in one colour, without names.

    Lines get thinner from layer to layer, so that those below show.
    """
    drawn = enlarged(image, scale).copy()
    thinnest = max(1, round(min(drawn.shape[:2]) / 300))
    for number, (detections, colour) in enumerate(layers):
        thickness = thinnest * (1 + 2 * (len(layers) - 1 - number))
        boxes = _array(detections["boxes"]).reshape(-1, 4) * scale
        _draw_objects(drawn, boxes, _array(detections["masks"]), [colour] * len(boxes), thickness, _THIN_WASH)
    return drawn


def _draw_objects(
    drawn: Pixels,
    boxes: NDArray[Any],
    masks: NDArray[Any] | None,
    colours: Sequence[Colour],
    thickness: int,
    wash: float = WASH,
) -> None:
    """Draw in place, small objects on top: a tint, a line along the inside of the mask's edge, and the box."""
    from PIL import Image, ImageFilter

    height, width = drawn.shape[:2]
    for n in np.argsort(-(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]), kind="stable"):
        if masks is not None:
            flat = Image.fromarray((masks[n] != 0).astype(np.uint8) * 255)
            flat = flat.resize((width, height), Image.Resampling.BICUBIC).point(lambda value: 255 * (value >= 128))
            inside = np.asarray(flat) > 0
            core = np.asarray(flat.filter(ImageFilter.MinFilter(2 * thickness + 1))) > 0
            drawn[inside] = ((1 - wash) * drawn[inside] + wash * np.array(colours[n])).round()
            drawn[inside & ~core] = colours[n]
        left, right = (int(np.clip(round(value), 0, width)) for value in boxes[n, ::2])
        top, bottom = (int(np.clip(round(value), 0, height)) for value in boxes[n, 1::2])
        part = drawn[top : max(bottom, top + 1), left : max(right, left + 1)]
        part[:thickness] = part[-thickness:] = colours[n]
        part[:, :thickness] = part[:, -thickness:] = colours[n]


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _colours(labels: Sequence[int], present: Sequence[int]) -> list[Colour]:
    """Return one hue per class; objects of one class differ in lightness, so that neighbours can be told apart."""
    numbers = {label: number for number, label in enumerate(sorted(set(present)))}
    colours: list[Colour] = []
    for index, label in enumerate(labels):
        hue = _HUES[numbers[label] % len(_HUES)] + 0.04 * (numbers[label] // len(_HUES))
        lightness = _LIGHTNESS[labels[:index].count(label) % len(_LIGHTNESS)]
        red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue % 1, lightness, 0.85))
        colours.append((red, green, blue))
    return colours


@dataclass(frozen=True)
class Shown:
    """One column of a sheet.

    Attributes:
        title: Above the image.
        detections: As `draw_detections` takes them.
        labels: (h, w), the group of every patch, -1 where it was dropped; None if nothing was reduced.
        spans: As `draw_groups` takes them.
    """

    title: str
    detections: Detections
    labels: Ints | None = None
    spans: tuple[float, float] | None = None


def sheet(
    image: Pixels,
    shown: Sequence[Shown],
    classes: Sequence[str],
    *,
    scale: int = 1,
    least: float = LEAST_SCORE,
    name: str = "",
) -> Image:
    """Draw the objects of several detectors side by side, and under them the groups of their tokens."""
    above, below = [], []
    present = [label for one in shown for label in _array(one.detections["labels"]).tolist()]
    for one in shown:
        drawn = draw_detections(image, one.detections, classes, scale=scale, least=least, present=present)
        above.append(Panel(drawn.pixels, one.title, drawn.summary))
        if one.labels is None:
            below.append(Panel(enlarged(image, scale), "all tokens"))
        else:
            title = f"{tokens(count_groups(one.labels))} of {one.labels.size}"
            below.append(Panel(draw_groups(image, one.labels, scale=scale, spans=one.spans), title))
    reduced = any(one.labels is not None for one in shown)
    return compose([Row(above, name), Row(below)] if reduced else [Row(above, name)])
