"""Objects drawn over an image: tinted masks with an outline, boxes, names and scores."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate, max_pool2d

from agglo.drawing.groups import Pixels, enlarged

Colour = tuple[int, int, int]
Detections = Mapping[str, Any]

WASH = 0.4  # how much of an object's colour lies over the photo
LEAST_SCORE = 0.3

# Hues in turns of the colour wheel, neighbours far apart: classes of an image take them in their order.
_HUES = (0.58, 0.08, 0.83, 0.36, 0.0, 0.5, 0.15, 0.7, 0.92, 0.26)
_LIGHTNESS = (0.55, 0.7, 0.44)  # of objects of one class, in turns


class DetectionDrawing(NamedTuple):
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
) -> DetectionDrawing:
    """Draw objects over an image (H, W, 3), `scale` times larger, but for those with a score below `least`.

    Args:
        detections: Boxes (n, 4) xyxy in pixels of the image, labels (n,) from 0; scores (n,) and masks (n, H, W) if
            there are any. What a detector returns, or the target of a data set.
        classes: The name of each label.
        present: Labels that colours are given to, so that several drawings agree; None is the ones drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    drawn = ("boxes", "labels", "masks", "scores")
    found = {name: np.asarray(torch.as_tensor(detections[name]).detach().cpu()) for name in drawn if name in detections}
    if "scores" in found:
        found = {name: values[found["scores"] >= least] for name, values in found.items()}
    names = [classes[label] for label in found["labels"]]
    if "scores" in found:
        names = [f"{name} {score:.2f}" for name, score in zip(names, found["scores"], strict=True)]
    boxes, labels = found["boxes"].reshape(-1, 4) * scale, found["labels"].tolist()
    colours = _colours(labels, labels if present is None else present)
    pixels = _with_objects(enlarged(image, scale), boxes, found.get("masks"), colours)
    canvas = Image.fromarray(pixels)
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(max(10, min(22, min(pixels.shape[:2]) // 36)))
    for name, box, colour in zip(names, boxes, colours, strict=True):
        corner = (max(0, box[0]), max(0, box[1]))
        pen.rectangle(pen.textbbox(corner, name, font=font), fill=colour)
        pen.text(corner, name, font=font, fill="black" if sum(colour) > 380 else "white")
    return DetectionDrawing(np.array(canvas), f"{len(boxes)} object{'' if len(boxes) == 1 else 's'}")


def _with_objects(image: Pixels, boxes: NDArray[Any], masks: NDArray[Any] | None, colours: Sequence[Colour]) -> Pixels:
    """Return the image with its objects, small ones on top: a tint, a line along the mask's edge, and the box."""
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if not len(boxes):
        return image
    order = np.argsort(-(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]), kind="stable")
    colours = [colours[number] for number in order]
    thickness = max(1, round(min(image.shape[:2]) / 300))
    drawn = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if masks is not None:
        shown = torch.from_numpy(masks[order] != 0).float()[:, None]
        shown = (interpolate(shown, image.shape[:2], mode="bilinear") >= 0.5).float()
        inner = 1 - max_pool2d(1 - shown, 2 * thickness + 1, stride=1, padding=thickness)
        # One by one: masks that are drawn in one call are left blank where they overlap.
        for mask, line, colour in zip(shown > 0, shown > inner, colours, strict=True):
            drawn = draw_segmentation_masks(drawn, mask, WASH, [colour])
            drawn = draw_segmentation_masks(drawn, line, 1.0, [colour])
    drawn = draw_bounding_boxes(drawn, torch.from_numpy(boxes[order]), colors=colours, width=thickness)
    return drawn.permute(1, 2, 0).numpy()


def _colours(labels: Sequence[int], present: Sequence[int]) -> list[Colour]:
    """Return one hue per class; objects of one class differ in lightness, so that neighbours can be told apart."""
    numbers = {label: number for number, label in enumerate(sorted(set(present)))}
    colours: list[Any] = []
    for index, label in enumerate(labels):
        hue = _HUES[numbers[label] % len(_HUES)] + 0.04 * (numbers[label] // len(_HUES))
        lightness = _LIGHTNESS[labels[:index].count(label) % len(_LIGHTNESS)]
        colours.append(tuple(round(255 * value) for value in colorsys.hls_to_rgb(hue % 1, lightness, 0.85)))
    return colours
