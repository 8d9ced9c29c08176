"""Figures of the detections of dense and reduced detectors, and of the groups of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as pil
from PIL.Image import Image

from agglo.drawing.groups import Ints, count_groups, draw_groups, enlarged, patch_labels, tokens
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.data.image_files import open_image
from agglo.lab.drawing.detections import LEAST_SCORE, draw_detections
from agglo.lab.evaluation.configs import Configs
from agglo.lab.evaluation.grid import Reducible
from agglo.lab.tasks.detection.data.transforms import transforms_for
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.patch import remove, trace
from agglo.utils.devices import require_device

_SMALL = 400  # pixels: images with a shorter side below this are drawn larger


def show(
    model: str,
    images: Sequence[Path],
    configs: Configs,
    *,
    checkpoint: Path | None = None,
    least_score: float = LEAST_SCORE,
    device: str = "cpu",
) -> Image:
    """Draw the detections of the dense detector and of each reduced one side by side, image below image.

    Below them are the groups of tokens after the last block that reduced.
    """
    if not 0 <= least_score <= 1:
        raise ValueError(f"score={least_score:g} must lie in 0 to 1")
    named = [(path.name, open_image(path)) for path in images]
    opened = open_detector(model, checkpoint)
    if opened.learned is None:
        warnings.warn("weights are random, and so is what is drawn; give --checkpoint", stacklevel=1)
    opened.model.to(require_device(device))
    sheets = [_drawn(opened, image, configs, least_score, name) for name, image in named]
    whole = pil.new("RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white")
    for number, each in enumerate(sheets):
        whole.paste(each, (0, sum(above.height for above in sheets[:number])))
    return whole


def _drawn(opened: Opened, image: Image, configs: Configs, least: float, name: str) -> Image:
    model, reducible = opened.model, Reducible(opened.model, opened.learned, f"checkpoint {opened.weights}")
    pixels, size = np.asarray(image), (image.height, image.width)
    scale = max(1, -(-_SMALL // min(size)))
    prepared, _ = transforms_for(opened.spec.image_size)[1](image, {})
    inputs = [prepared.to(next(model.parameters()).device)]
    with torch.inference_mode():
        titles, found = ["dense"], [model(inputs, original_sizes=[size])[0]]
        groups = [Panel(enlarged(pixels, scale), "all tokens")]
        for config, row in configs.items():
            reducible.apply(config)
            with trace(model) as record:
                found.append(model(inputs, original_sizes=[size])[0])
            titles.append(f"{row}, {config.budget}")
            labels, spans = groups_on_grid(model.backbone, patch_labels(record), tuple(prepared.shape[-2:]))
            drawn_groups = draw_groups(pixels, labels, scale=scale, spans=spans)
            groups.append(Panel(drawn_groups, f"{tokens(count_groups(labels))} of {labels.size}"))
    remove(model)
    how: dict[str, Any] = {"scale": scale, "least": least}
    how["present"] = [label for objects in found for label in objects["labels"].tolist()]
    drawn = [draw_detections(pixels, objects, opened.spec.class_names, **how) for objects in found]
    above = [Panel(each.pixels, title, each.summary) for title, each in zip(titles, drawn, strict=True)]
    return compose([Row(above, name), Row(groups)])


def groups_on_grid(backbone: Any, found: dict[int, Ints], size: Sequence[int]) -> tuple[Ints, tuple[float, float]]:
    """Return the groups (h, w) after the last block that reduced, and how many patches cover the image itself."""
    patch, multiple = backbone.strides[-2], backbone.strides[-1]
    grid = [-(-side // multiple) * multiple // patch for side in size]
    labels = found[max(found)][0]
    return labels.reshape(grid), (size[0] / patch, size[1] / patch)
