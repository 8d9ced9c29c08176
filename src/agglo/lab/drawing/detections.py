"""Objects drawn over an image: tinted masks with an outline, boxes, names and scores.

drawn = draw_detections(image, detections, data.classes)
sheet(image, [Shown("dense", dense), Shown("atc, keep rate 0.5", reduced, labels)], data.classes).save("both.png")
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agglo.drawing.groups import Ints, Pixels, count_groups, draw_groups, enlarged, tokens
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.drawing.tags import Tag, draw_tags, text_size

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]
Detections = Mapping[str, Any]

WASH, _HAIRLINE = 0.4, 0.5  # how much of an object's colour lies over the photo, and of black just outside its line
_THIN_WASH = 0.15  # where several models draw over one another
LEAST_SCORE = 0.3

# Hues in turns of the colour wheel, neighbours far apart: classes of an image take them in their order.
_HUES = (0.58, 0.08, 0.83, 0.36, 0.0, 0.5, 0.15, 0.7, 0.92, 0.26)
_LIGHTNESS = (0.55, 0.7, 0.44)  # of objects of one class, in turns


@dataclass(frozen=True)
class Drawn:
    """An image (H, W, 3) with its objects.

    Attributes:
        pixels: The drawing.
        objects: How many were drawn.
        unnamed: How many of them have no label because there was no room.
        only: The name of the class if there is only one, which is then not repeated in labels.
    """

    pixels: Pixels
    objects: int
    unnamed: int
    only: str | None

    @property
    def summary(self) -> str:
        """Caption such as "3 objects (dog), 1 without a label for want of room"."""
        objects = f"{self.objects} object" if self.objects == 1 else f"{self.objects} objects"
        named = "" if self.only is None else f" ({self.only})"
        return objects + named + (f", {self.unnamed} without a label for want of room" if self.unnamed else "")


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
    boxes, labels, scores, masks = _chosen(image, detections, classes, least)
    drawn = enlarged(image, scale).copy()
    colours = _colours(labels, labels if present is None else present)
    thickness = max(1, round(min(drawn.shape[:2]) / 300))
    order = np.argsort(-_areas(boxes), kind="stable")  # small objects on top
    if masks is not None:
        for number in order:
            _draw_mask(drawn, _enlarged_mask(masks[number], scale), colours[number], thickness)
        thickness = max(1, thickness // 2)  # of boxes, which say less than masks
    for number in order:
        _draw_box(drawn, boxes[number] * scale, colours[number], thickness)
    ranked = order[::-1] if scores is None else np.argsort(-scores, kind="stable")
    only = classes[labels[0]] if len(labels) > 1 and len(set(labels.tolist())) == 1 else None
    tags = [Tag(_text(classes, labels, scores, only, n), tuple(boxes[n] * scale), colours[n]) for n in ranked]
    drawn, unnamed = draw_tags(drawn, tags, text_size(drawn.shape))
    return Drawn(drawn, len(boxes), unnamed, only)


def _text(classes: Sequence[str], labels: Ints, scores: NDArray[Any] | None, only: str | None, number: int) -> str:
    words = [] if only is not None else [classes[labels[number]]]
    return " ".join(words if scores is None else [*words, f"{scores[number]:.2f}"])


def _chosen(
    image: Pixels, detections: Detections, classes: Sequence[str], least: float
) -> tuple[NDArray[Any], Ints, NDArray[Any] | None, NDArray[Any] | None]:
    boxes, labels = _array(detections["boxes"]).reshape(-1, 4).astype(float), _array(detections["labels"])
    scores, masks = (_array(detections[key]) if key in detections else None for key in ("scores", "masks"))
    for name, values in {"labels": labels, "scores": scores, "masks": masks}.items():
        if values is not None and len(values) != len(boxes):
            raise ValueError(f"{len(values)} {name} do not fit {len(boxes)} boxes")
    if masks is not None and masks.shape[1:] != image.shape[:2]:
        raise ValueError(f"masks of {masks.shape[1:]} do not fit an image of {image.shape[:2]} (height, width)")
    if labels.size and not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(f"labels {labels.min()} to {labels.max()} do not fit {len(classes)} classes")
    kept = np.arange(len(boxes)) if scores is None else np.flatnonzero(scores >= least)
    return boxes[kept], labels[kept], None if scores is None else scores[kept], None if masks is None else masks[kept]


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _areas(boxes: NDArray[Any]) -> NDArray[Any]:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _colours(labels: Ints, present: Sequence[int] | Ints) -> list[Colour]:
    """Return one hue per class; objects of one class differ in lightness, so that neighbours can be told apart."""
    hues = {int(label): number for number, label in enumerate(sorted({int(label) for label in present}))}
    seen: dict[int, int] = {}
    colours = []
    for label in labels.tolist():
        colours.append(_colour(hues[label], seen.get(label, 0)))
        seen[label] = seen.get(label, 0) + 1
    return colours


def _colour(number: int, instance: int) -> Colour:
    """Return the colour of an object, given the number of its class in the image, and its own in the class."""
    hue = _HUES[number % len(_HUES)] + 0.04 * (number // len(_HUES))
    lightness = _LIGHTNESS[instance % len(_LIGHTNESS)]
    red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue % 1, lightness, 0.85))
    return red, green, blue


def _enlarged_mask(mask: NDArray[Any], scale: int) -> NDArray[np.bool_]:
    from PIL import Image, ImageFilter

    if scale == 1:
        return mask.astype(bool)
    height, width = mask.shape
    flat = Image.fromarray((mask != 0).astype(np.uint8) * 255)
    large = flat.resize((width * scale, height * scale), Image.Resampling.BICUBIC)
    return np.asarray(large.filter(ImageFilter.GaussianBlur(0.6 * scale))) >= 128  # rounds the steps of small pixels


def _draw_mask(drawn: Pixels, mask: NDArray[np.bool_], colour: Colour, thickness: int, wash: float = WASH) -> None:
    """Draw in place a tint, a line along the inside of the edge, and a dark hairline along the outside."""
    from PIL import Image, ImageFilter

    if not mask.any():
        return
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    part = (slice(max(rows[0] - 1, 0), rows[-1] + 2), slice(max(columns[0] - 1, 0), columns[-1] + 2))
    inside, under = mask[part], drawn[part]
    flat = Image.fromarray(inside.astype(np.uint8))
    core = np.asarray(flat.filter(ImageFilter.MinFilter(2 * thickness + 1))).astype(bool)
    outside = np.asarray(flat.filter(ImageFilter.MaxFilter(3))).astype(bool) & ~inside
    under[inside] = ((1 - wash) * under[inside] + wash * np.array(colour)).round()
    under[inside & ~core] = colour
    under[outside] = ((1 - _HAIRLINE) * under[outside]).round()


def _draw_box(drawn: Pixels, box: NDArray[Any], colour: Colour, thickness: int) -> None:
    """Draw in place, inside the image; a box of any size has four sides."""
    height, width = drawn.shape[:2]
    left, right = (int(np.clip(round(value), 0, width)) for value in (box[0], box[2]))
    top, bottom = (int(np.clip(round(value), 0, height)) for value in (box[1], box[3]))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    part = drawn[top:bottom, left:right]
    part[:thickness] = part[-thickness:] = colour
    part[:, :thickness] = part[:, -thickness:] = colour


@dataclass(frozen=True)
class Shown:
    """One column of a sheet.

    Attributes:
        title: Above the image.
        detections: As `draw_detections` takes them.
        labels: (h, w), the group of every patch, -1 where it was dropped; None if nothing was reduced.
        spans: How many patches (down, across) cover the image itself, if a padded grid reaches beyond it: (50, 66.7)
            of 50 x 68. None is all of them.
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
    present = sorted({int(label) for one in shown for label in _array(one.detections["labels"]).tolist()})
    for one in shown:
        drawn = draw_detections(image, one.detections, classes, scale=scale, least=least, present=present)
        above.append(Panel(drawn.pixels, one.title, drawn.summary))
        if one.labels is None:
            below.append(Panel(enlarged(image, scale), "all tokens"))
        else:
            title = f"{tokens(count_groups(one.labels))} of {one.labels.size}"
            below.append(Panel(draw_groups_under(image, one.labels, one.spans, scale), title))
    rows = [Row(above, name)]
    if any(one.labels is not None for one in shown):
        rows.append(Row(below))
    return compose(rows)


def draw_groups_under(image: Pixels, labels: Ints, spans: tuple[float, float] | None, scale: int) -> Pixels:
    """Draw groups (h, w) over an image that their grid may reach beyond. spans: See `Shown`."""
    of_pixels = groups_of_pixels(labels, image.shape[:2], spans)
    rows = labels.shape[0] if spans is None else spans[0]
    thickness = max(1, int(image.shape[0] * scale / rows / 32))
    return draw_groups(image, of_pixels, scale=scale, thickness=thickness)


def groups_of_pixels(labels: Ints, shape: Sequence[int], spans: tuple[float, float] | None = None) -> Ints:
    """Return the group (H, W) under every pixel of an image of that shape. spans: See `Shown`."""
    down, across = labels.shape if spans is None else spans
    if not (0 < down <= labels.shape[0] and 0 < across <= labels.shape[1]):
        raise ValueError(f"spans={spans} must lie within the {labels.shape[0]} x {labels.shape[1]} patches")
    rows = ((np.arange(shape[0]) + 0.5) * down / shape[0]).astype(int)
    columns = ((np.arange(shape[1]) + 0.5) * across / shape[1]).astype(int)
    return labels[rows[:, None], columns]


def draw_over_one_another(image: Pixels, layers: Sequence[tuple[Detections, Colour]], *, scale: int = 1) -> Pixels:
    """Draw the detections of several models over one image (H, W, 3), each model in one colour, without names.

    Lines get thinner from layer to layer, so that those below show.
    """
    drawn = enlarged(image, scale).copy()
    thinnest = max(1, round(min(drawn.shape[:2]) / 300))
    for number, (detections, colour) in enumerate(layers):
        thickness = thinnest * (1 + 2 * (len(layers) - 1 - number))
        boxes = _array(detections["boxes"]).reshape(-1, 4).astype(float)
        for mask in _array(detections["masks"]):
            _draw_mask(drawn, _enlarged_mask(mask, scale), colour, thickness, _THIN_WASH)
        for box in boxes:
            _draw_box(drawn, box * scale, colour, thickness)
    return drawn
