"""Healing of a classifier by its name, on images of a folder, prepared as `agglo evaluate` prepares them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.healing import Healed, heal
from agglo.lab.evaluation.grid import Reducible, one_of_several
from agglo.lab.tasks.classification.data import ClassificationData, open_split
from agglo.lab.tasks.classification.data.transforms import inputs_for
from agglo.lab.tasks.classification.evaluation.grid import spread
from agglo.models.checkpoints import Checkpoint
from agglo.models.libraries import class_count
from agglo.models.opening import ModelSpec, build
from agglo.utils.devices import require_device, torch_threads


def heal_on_folder(
    spec: ModelSpec,
    config: ReductionConfig,
    data: Path,
    *,
    dataset: str | None = None,
    split: str | None = None,
    images: int = 2000,
    device: str = "cpu",
    threads: int | None = None,
    **how: Any,
) -> Healed:
    """Reduce a classifier and heal it; `how` is as for `agglo.heal`.

    Args:
        dataset: Its name; None recognises it by its files.
        split: "train" or "val"; None is the images to train on where there are any.
        images: How many at most, evenly spread over them.
    """
    opened = _opened(dataset, data, split)
    accelerator = one_of_several(device)
    checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
    model = build(spec, checkpoint)
    model.to(require_device(device) if accelerator is None else accelerator.device)
    learned = None if checkpoint is None else checkpoint.method
    Reducible(model, learned, f"checkpoint {spec.checkpoint}").apply(config)
    if opened.multi_label or len(opened.classes) != class_count(model):
        opened = replace(opened, targets=[()] * len(opened))  # classes that are not the model's report nothing
    with torch_threads(threads):
        return heal(model, spread(opened, images), inputs=inputs_for(model, opened.name), **how)


def _opened(dataset: str | None, data: Path, split: str | None) -> ClassificationData:
    if split is not None:
        return open_split(dataset, data, split)
    try:
        return open_split(dataset, data, "train")
    except ValueError:
        return open_split(dataset, data, "val")
