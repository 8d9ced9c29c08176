"""One image through a detector, dense and reduced: what both find, and what only one of them does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agglo.drawing.groups import Ints, Pixels, count_groups, patch_labels
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.drawing.detections import LEAST_SCORE
from agglo.lab.playground.settings import Chosen
from agglo.lab.tasks.detection.data.transforms import transforms_for
from agglo.lab.tasks.detection.evaluation.figures import groups_on_grid
from agglo.lab.tasks.detection.specs import Opened
from agglo.patch import apply, remove, report, trace
from agglo.utils.timing import timed_pass

if TYPE_CHECKING:
    from PIL.Image import Image

SAME = 0.5  # intersection over union of boxes from which two models found the same object
LONGEST = 1024  # pixels of the long side of an image


@dataclass(frozen=True)
class Found:
    """What one pass found: boxes (n, 4), scores, labels and masks (n, H, W) of the objects of a high enough score."""

    title: str
    seconds: float
    gflops: float | None
    objects: Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """An object that the dense detector found, the reduced one, or both."""

    name: str
    dense: float | None  # score; None where the detector did not find it
    reduced: float | None
    overlap: float | None  # intersection over union of the boxes where both found it


@dataclass(frozen=True)
class Detected:
    """The dense and the reduced detector on one image."""

    pixels: Pixels  # (H, W, 3)
    classes: list[str]
    tokens: int  # patch tokens of the dense detector
    line: str  # of Python, which applies the reduction
    dense: Found
    reduced: Found | None = None
    stages: Mapping[int, Ints] = field(default_factory=dict)  # by block, the group of every patch (h, w) after it
    spans: tuple[float, float] | None = (
        None  # patches that lie over the image, as `lab.drawing.detections.Shown` has it
    )
    refused: str | None = None  # why there is nothing reduced
    pairs: Sequence[Pair] = ()

    @property
    def passes(self) -> list[Found]:
        return [self.dense] if self.reduced is None else [self.dense, self.reduced]

    @property
    def counts(self) -> dict[int, int]:
        """Patch tokens after each reduction, by block."""
        return {block: count_groups(labels) for block, labels in self.stages.items()}


def detect(opened: Opened, image: Image, chosen: Chosen, least: float = LEAST_SCORE) -> Detected:
    """Run a detector on one image, dense and reduced. The model is dense afterwards."""
    if not 0 <= least <= 1:
        raise ValueError(f"score={least:g} must lie in 0 to 1")
    image = image.copy()
    image.thumbnail((LONGEST, LONGEST))
    model: Any = opened.model
    pixels, _ = transforms_for(opened.spec.image_size)[1](image, {})
    inputs = [pixels.to(next(model.parameters()).device)]

    def run(images: Any) -> Any:
        return model(images, original_sizes=[(image.height, image.width)])[0]

    classes = list(opened.spec.classes) or [f"class {label}" for label in range(opened.spec.n_classes)]
    try:
        apply(model, "atc", keep_rate=1.0)
        whole = report(model)
        assert whole is not None
        remove(model)
        seconds, objects = timed_pass(run, inputs)
        dense = Found("dense", seconds, whole.gflops_before, _confident(objects, least))
        found = Detected(np.asarray(image), classes, whole.n_tokens, chosen.line, dense)
        try:
            apply(model, chosen.config)
            applied = report(model)
            seconds, objects = timed_pass(run, inputs)
            # Watching takes time too: not of the pass that is timed, since the dense model runs unwatched as well.
            with torch.inference_mode(), trace(model) as record:
                run(inputs)
        except (ValueError, UnsupportedModelError) as error:
            return replace(found, refused=str(error))
    finally:
        remove(model)
    gflops = None if applied is None else applied.gflops_after
    reduced = Found(chosen.title, seconds, gflops, _confident(objects, least))
    stages, spans = {}, None
    for block, labels in patch_labels(record).items():
        stages[block], spans = groups_on_grid(model.backbone, {block: labels}, tuple(pixels.shape[-2:]))
    both = pairs(dense.objects, reduced.objects, classes)
    return replace(found, reduced=reduced, stages=stages, spans=spans, pairs=both)


def _confident(objects: Mapping[str, Any], least: float) -> dict[str, Any]:
    kept = objects["scores"] >= least
    return {name: values[kept].cpu().numpy() for name, values in objects.items()}


def pairs(dense: Mapping[str, Any], reduced: Mapping[str, Any], classes: Sequence[str]) -> list[Pair]:
    """Match objects of one class whose boxes overlap most, the highest scores first; the rest stays single."""
    from torchvision.ops import box_iou

    overlaps = box_iou(torch.from_numpy(dense["boxes"]), torch.from_numpy(reduced["boxes"])).numpy()
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
