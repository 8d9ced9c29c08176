"""What a detector finds in photographs, dense beside reduced, and the groups of tokens it found it with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agglo.detection.data.transforms import transforms_for
from agglo.detection.specs import Opened, open_detector
from agglo.drawing.detections import LEAST_SCORE, Shown, sheet
from agglo.drawing.groups import Ints, patch_labels
from agglo.experiments.devices import require_device
from agglo.experiments.evaluation.cells import Reducible
from agglo.experiments.image_files import open_image
from agglo.experiments.variants import Variant
from agglo.patching import remove, trace

if TYPE_CHECKING:
    from PIL.Image import Image

_SMALL = 400  # pixels: pictures with a shorter side below this are drawn larger


def show(
    model: str,
    images: Sequence[Path],
    variants: Sequence[Variant],
    *,
    checkpoint: Path | None = None,
    image_size: int | None = None,
    least_score: float = LEAST_SCORE,
    device: str = "cpu",
) -> Image:
    """A sheet: for each picture what the dense detector finds, then for each variant what it finds, and below them the
    groups of tokens after the last block that reduced.

    model, checkpoint: as `open_detector` takes them. image_size: None is what the model was trained with.
    """
    if not 0 <= least_score <= 1:
        raise ValueError(f"score={least_score:g} must lie in 0 to 1")
    pictures = [open_image(path) for path in images]
    opened = open_detector(model, checkpoint)
    if opened.learned is None:
        warnings.warn("weights are random, and so is what is drawn; give --checkpoint", stacklevel=1)
    opened.model.to(require_device(device))
    sheets = [
        _drawn(opened, picture, variants, image_size or opened.spec.image_size, least_score, path.name)
        for path, picture in zip(images, pictures, strict=True)
    ]
    return stacked(sheets)


def _drawn(
    opened: Opened, picture: Image, variants: Sequence[Variant], side: int | None, least: float, name: str
) -> Image:
    model, reducible = opened.model, Reducible(opened.model, opened.learned, f"checkpoint {opened.weights}")
    device = next(model.parameters()).device
    size = (picture.height, picture.width)
    _, transform = transforms_for(side)
    pixels, _ = transform(picture, {})
    inputs = [pixels.to(device)]
    columns = []
    with torch.inference_mode():
        reducible.apply(None)
        columns.append(Shown("dense", model(inputs, original_sizes=[size])[0]))
        for variant in variants:
            reducible.apply(variant)
            with trace(model) as record:
                found = model(inputs, original_sizes=[size])[0]
            labels, spans = groups_on_picture(model.backbone, patch_labels(record), tuple(pixels.shape[-2:]))
            columns.append(Shown(f"{variant.name}, {variant.budget_text}", found, labels, spans))
    remove(model)
    classes = opened.spec.classes or [f"class {label}" for label in range(opened.spec.n_classes)]
    scale = max(1, -(-_SMALL // min(size)))
    return sheet(np.asarray(picture), columns, classes, scale=scale, least=least, name=name)


def groups_on_picture(backbone: Any, found: dict[int, Ints], size: Sequence[int]) -> tuple[Ints, tuple[float, float]]:
    """The groups (h, w) after the last block that reduced, and how many patches lie over the picture itself."""
    patch, multiple = backbone.strides[-2], backbone.strides[-1]
    grid = [-(-side // multiple) * multiple // patch for side in size]
    labels = found[max(found)][0]
    return labels.reshape(grid), (size[0] / patch, size[1] / patch)


def stacked(sheets: Sequence[Image]) -> Image:
    """Sheets below each other, on white."""
    from PIL import Image

    whole = Image.new("RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white")
    top = 0
    for each in sheets:
        whole.paste(each, (0, top))
        top += each.height
    return whole
