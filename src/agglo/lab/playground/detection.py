"""One image through a detector, dense and reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from agglo.config import ReductionConfig
from agglo.drawing.groups import Pixels, count_groups, patch_labels
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.drawing.detections import LEAST_SCORE
from agglo.lab.playground.settings import Result, dense_size
from agglo.lab.tasks.detection.data.transforms import transforms_for
from agglo.lab.tasks.detection.evaluation.figures import groups_on_grid
from agglo.lab.tasks.detection.specs import Opened
from agglo.patch import apply, remove, report, trace
from agglo.utils.timing import timed_pass

LONGEST = 1024  # pixels of the long side of an image


@dataclass(frozen=True, kw_only=True)
class Found(Result):
    """A pass of a detector: boxes (n, 4), scores, labels and masks (n, H, W) of the objects of a high enough score."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[float, float] | None = None  # patches over the image, as `draw_groups` takes them


@dataclass(frozen=True)
class Detected:
    """The dense and the reduced detector on one image."""

    pixels: Pixels  # (H, W, 3)
    classes: list[str]
    tokens: int  # patch tokens of the dense detector
    dense: Found
    reduced: Found

    @property
    def passes(self) -> list[Found]:
        """Every pass that ran."""
        return [self.dense] if self.reduced.refused is not None else [self.dense, self.reduced]


def detect(opened: Opened, image: Image, config: ReductionConfig, score: float = LEAST_SCORE) -> Detected:
    """Run a detector on one image, dense and reduced, for objects of at least this score. The model is dense after."""
    image = image.copy()
    image.thumbnail((LONGEST, LONGEST))
    model: Any = opened.model
    pixels, _ = transforms_for(opened.spec.image_size)[1](image, {})
    inputs = [pixels.to(next(model.parameters()).device)]

    def run(images: Any) -> Any:
        return model(images, original_sizes=[(image.height, image.width)])[0]

    def confident(objects: Mapping[str, Any]) -> dict[str, Any]:
        kept = objects["scores"] >= score
        return {name: values[kept].cpu().numpy() for name, values in objects.items()}

    try:
        tokens, gflops = dense_size(model)
        seconds, objects = timed_pass(run, inputs)
        dense = Found(config=None, seconds=seconds, gflops=gflops, objects=confident(objects))
        try:
            applied: Any = report(apply(model, config))
            seconds, objects = timed_pass(run, inputs)
            # Watching takes time too: not of the pass that is timed, since the dense model runs unwatched as well.
            with torch.inference_mode(), trace(model) as record:
                run(inputs)
        except (ValueError, UnsupportedModelError) as error:
            reduced = Found(config=config, refused=str(error))
        else:
            stages, spans = {}, None
            for block, labels in patch_labels(record).items():
                stages[block], spans = groups_on_grid(model.backbone, {block: labels}, tuple(pixels.shape[-2:]))
            reduced = Found(
                config=config,
                seconds=seconds,
                gflops=applied.gflops_after,
                counts=[count_groups(labels) for labels in stages.values()],
                stages=stages,
                objects=confident(objects),
                spans=spans,
            )
    finally:
        remove(model)
    return Detected(np.asarray(image), opened.spec.class_names, tokens, dense, reduced)
