"""From settings to what is trained: the detector with its reduction, and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from agglo.detection.data import DetectionData, collate, make_scenes, open_coco, transforms_for
from agglo.detection.model.build import method_weights
from agglo.detection.training.settings import DetectionSettings
from agglo.experiments.checkpoints import load_method
from agglo.experiments.randomness import seed_everything
from agglo.experiments.training.batches import ImageBatches, Share
from agglo.experiments.training.reduction import reduce


@dataclass(frozen=True)
class Splits:
    """The data of a run, as it is."""

    train: DetectionData
    validation: DetectionData

    @property
    def skipped(self) -> list[str]:
        """What is left out, in words; once, where both are of one file."""
        return list(dict.fromkeys([*self.train.skipped, *self.validation.skipped]))

    @property
    def remarks(self) -> list[str]:
        return list(dict.fromkeys([*self.train.remarks, *self.validation.remarks]))


def open_splits(settings: DetectionSettings, root: Path) -> Splits:
    """Both splits, without transforms yet. Images without objects are not trained on, but are evaluated."""
    if settings.dataset == "scenes":
        side = settings.image_size or 112
        return Splits(
            make_scenes(root, settings.images or settings.scenes, settings.seed, "train", side),
            make_scenes(root, settings.images or settings.validation_scenes, 0, "val", side),
        )
    train: Any = open_coco(root, "train", skip_bad=settings.skip_bad, with_objects=True)
    if settings.held_out:
        every = [math.floor((index + 1) * settings.held_out) for index in range(len(train))]
        held = [index for index, count in enumerate(every) if count > (every[index - 1] if index else 0)]
        if not held:
            raise ValueError(f"held_out={settings.held_out:g} of {len(train)} images is not one image")
        train, validation = train.part(sorted(set(range(len(train))) - set(held))), train.part(held)
    elif settings.images is not None:
        # To overfit: judged by the very images that are learned.
        validation = train
    else:
        validation = open_coco(root, "val", skip_bad=settings.skip_bad)
    train, validation = train.spread(settings.images), validation.spread(settings.images)
    if train.classes != validation.classes:
        one_sided = sorted(set(train.classes) ^ set(validation.classes)) or ["the order of the classes"]
        raise ValueError(f"the splits of data={str(root)!r} differ in their classes: {', '.join(one_sided[:5])}")
    return Splits(train, validation)


def build_model(settings: DetectionSettings, classes: list[str]) -> nn.Module:
    """The detector to train, reduced as settings say."""
    seed_everything(settings.seed, "model")
    weights = None if settings.checkpoint is None else Path(settings.checkpoint)
    model = settings.spec(classes).build(weights, start=True)
    if settings.method != "none":
        reduce(model, settings)
        if weights is not None and (learned := method_weights(weights, model)):
            load_method(model, learned, f"checkpoint={settings.checkpoint!r}")
    return model


def training_data(settings: DetectionSettings, splits: Splits, share: Share) -> ImageBatches:
    """Augmented batches: lists of images of several sizes, and of their targets."""
    transform, _ = transforms_for(settings.image_size, flip=settings.flip)
    data = splits.train.prepared(transform)
    return ImageBatches(data, share, seed=settings.seed, workers=settings.workers, collate=_collated)


def _collated(batch: list[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Plain tensors, which may be sent to any device: boxes and masks have been moved by now."""
    images, targets = collate(batch)
    kept = ("boxes", "labels", "masks")
    return images, [{name: target[name].as_subclass(type(target["labels"])) for name in kept} for target in targets]
