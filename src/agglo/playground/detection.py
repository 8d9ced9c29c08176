"""One picture through a detector, dense and reduced: what both find, and what only one of them does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agglo.detection.data.transforms import transforms_for
from agglo.detection.evaluation.pictures import groups_on_picture
from agglo.detection.specs import Opened
from agglo.drawing.detections import LEAST_SCORE
from agglo.drawing.groups import Ints, Pixels, count_groups, patch_labels
from agglo.experiments.evaluation.turns import timed_pass
from agglo.hosts.swap import UnsupportedModelError
from agglo.patching import apply, reduction, remove, trace
from agglo.playground.settings import Chosen

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
    """pixels: (H, W, 3). tokens: of the dense detector. counts: patch tokens after each reduction, by block.
    labels, spans: the groups after the last one, as `drawing.detections.Shown` has them.
    refused: why there is nothing reduced."""

    pixels: Pixels
    classes: list[str]
    tokens: int
    line: str
    dense: Found
    reduced: Found | None = None
    counts: Mapping[int, int] | None = None
    labels: Ints | None = None
    spans: tuple[float, float] | None = None
    refused: str | None = None
    pairs: tuple[Pair, ...] = ()


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
        base = Detected(np.asarray(image), classes, whole.n_tokens, chosen.line, dense)
        try:
            apply(model, **chosen.arguments)
            told = reduction(model)
            with trace(model) as record:
                seconds, objects = timed_pass(run, inputs)
        except (ValueError, UnsupportedModelError) as error:
            return Detected(base.pixels, classes, base.tokens, chosen.line, dense, refused=str(error))
    finally:
        remove(model)
    reduced = Found(chosen.title, seconds, None if told is None else told.gflops_after, _confident(objects, least))
    stages = patch_labels(record)
    labels, spans = groups_on_picture(model.backbone, stages, tuple(pixels.shape[-2:]))
    return Detected(
        base.pixels,
        classes,
        base.tokens,
        chosen.line,
        dense,
        reduced,
        {block: count_groups(of[0]) for block, of in stages.items()},
        labels,
        spans,
        pairs=tuple(pairs(dense.objects, reduced.objects, classes)),
    )


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
