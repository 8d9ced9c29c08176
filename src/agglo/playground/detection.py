"""One picture through a detector, dense and reduced: what both find, and what only one of them does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agglo.detection.data.transforms import transforms_for
from agglo.detection.evaluation.pictures import groups_on_picture
from agglo.detection.specs import Opened
from agglo.drawing.detections import LEAST_SCORE
from agglo.drawing.groups import Ints, Pixels, count_groups, patch_labels
from agglo.experiments.evaluation.turns import timed_pass
from agglo.hosts.swap import UnsupportedModelError
from agglo.patching import apply, reduction, remove, trace
from agglo.playground.settings import Chosen
from agglo.tracing import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

SAME = 0.5  # overlap (intersection over union of boxes) of what two models found that makes it the same thing
LONGEST = 1024  # pixels of a picture that are looked at


@dataclass(frozen=True)
class Found:
    """seconds: of the pass. objects: boxes (n, 4), scores, labels and masks (n, H, W) of the surer ones."""

    title: str
    seconds: float
    gflops: float | None
    objects: Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """A thing that the dense detector found, the reduced one, or both. Scores are None where one did not find it;
    overlap is that of the boxes where both did."""

    name: str
    dense: float | None
    reduced: float | None
    overlap: float | None


@dataclass(frozen=True)
class Detected:
    """pixels: (H, W, 3). tokens: of the dense detector. stages: by block, the group of every patch (h, w) after it.
    spans: how many patches lie over the picture, as `drawing.detections.Shown` has it.
    refused: why there is nothing reduced."""

    pixels: Pixels
    classes: list[str]
    tokens: int
    line: str
    dense: Found
    reduced: Found | None = None
    stages: Mapping[int, Ints] = field(default_factory=dict)
    spans: tuple[float, float] | None = None
    refused: str | None = None
    pairs: tuple[Pair, ...] = ()

    @property
    def counts(self) -> dict[int, int]:
        """Patch tokens after each reduction, by block."""
        return {block: count_groups(labels) for block, labels in self.stages.items()}


def detect(opened: Opened, image: Image, chosen: Chosen, least: float = LEAST_SCORE) -> Detected:
    """What a detector finds in a picture, dense and reduced. The model is dense afterwards."""
    if not 0 <= least <= 1:
        raise ValueError(f"score={least:g} must lie in 0 to 1")
    image = image.copy()
    image.thumbnail((LONGEST, LONGEST))
    model: Any = opened.model
    size = (image.height, image.width)
    pixels, _ = transforms_for(opened.spec.image_size)[1](image, {})
    inputs = [pixels.to(next(model.parameters()).device)]

    def run(images: Any) -> Any:
        return model(images, original_sizes=[size])[0]

    classes = list(opened.spec.classes) or [f"class {label}" for label in range(opened.spec.n_classes)]
    try:
        apply(model, "atc", keep_rate=1.0)
        whole = reduction(model)
        assert whole is not None
        remove(model)
        seconds, objects = timed_pass(run, inputs)
        dense = Found("dense", seconds, whole.gflops_before, _confident(objects, least))
        found = Detected(np.asarray(image), classes, whole.n_tokens, chosen.line, dense)
        try:
            apply(model, **chosen.arguments)
            told = reduction(model)
            seconds, objects = timed_pass(run, inputs)
            # Looking on takes time too: not of the pass that is timed, since the dense model runs unwatched as well.
            with torch.inference_mode(), trace(model) as record:
                run(inputs)
        except (ValueError, UnsupportedModelError) as error:
            return replace(found, refused=str(error))
    finally:
        remove(model)
    reduced = Found(chosen.title, seconds, None if told is None else told.gflops_after, _confident(objects, least))
    stages, spans = _on_picture(model.backbone, record, tuple(pixels.shape[-2:]))
    both = tuple(pairs(dense.objects, reduced.objects, classes))
    return replace(found, reduced=reduced, stages=stages, spans=spans, pairs=both)


def _on_picture(
    backbone: Any, record: Trace, size: tuple[int, int]
) -> tuple[dict[int, Ints], tuple[float, float] | None]:
    """By block, the groups (h, w) after it, and how many patches lie over the picture; None where nothing reduced."""
    stages, spans = {}, None
    for block, labels in patch_labels(record).items():
        stages[block], spans = groups_on_picture(backbone, {block: labels}, size)
    return stages, spans


def _confident(objects: Mapping[str, Any], least: float) -> dict[str, Any]:
    kept = objects["scores"] >= least
    return {name: values[kept].cpu().numpy() for name, values in objects.items()}


def pairs(dense: Mapping[str, Any], reduced: Mapping[str, Any], classes: list[str]) -> list[Pair]:
    """Who found what: things of one class whose boxes overlap most are one, the surest first; the rest is one's own."""
    overlaps = box_overlaps(dense["boxes"], reduced["boxes"])
    overlaps = np.where(dense["labels"][:, None] == reduced["labels"][None], overlaps, 0.0)
    found, taken = [], set()
    for number in np.argsort(-dense["scores"], kind="stable"):
        name, score = classes[dense["labels"][number]], float(dense["scores"][number])
        free = [other for other in np.flatnonzero(overlaps[number] >= SAME) if other not in taken]
        if not free:
            found.append(Pair(name, score, None, None))
            continue
        best = max(free, key=lambda other: overlaps[number, other])
        taken.add(best)
        found.append(Pair(name, score, float(reduced["scores"][best]), float(overlaps[number, best])))
    own = [number for number in range(len(reduced["labels"])) if number not in taken]
    return found + [Pair(classes[reduced["labels"][n]], None, float(reduced["scores"][n]), None) for n in own]


def box_overlaps(one: Any, other: Any) -> Any:
    """Intersection over union of boxes (n, 4) and (m, 4): (n, m)."""
    from torch import from_numpy
    from torchvision.ops import box_iou

    return box_iou(from_numpy(one), from_numpy(other)).numpy()
