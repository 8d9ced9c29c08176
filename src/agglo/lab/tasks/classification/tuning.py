"""Tuning of a classifier by its name, on images of a folder, prepared as `agglo evaluate` prepares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from agglo.lab.tasks.classification.data import open_split
from agglo.lab.tasks.classification.data.transforms import evaluation_transform, inputs_for
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings, prompted, spread
from agglo.models.libraries import class_count
from agglo.models.opening import build
from agglo.models.outputs import features_in
from agglo.tuning import Tuned, TuneSettings, tune
from agglo.tuning.settings import Output
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.progress import progress


def prepare(settings: EvaluationSettings, *, quiet: bool = False) -> tuple[nn.Module, list[Any], Output]:
    """Build the model and read the images.

    Returns:
        The model; one batch of images (N, C, H, W), as bytes, with classes (N,) if the data set's are those of the
        model; and the function that gives logits, or the features of a model without a head.
    """
    dtype, device = dtype_named(settings.dtype), require_device(settings.device)
    data = open_split(settings.dataset, settings.data, "val")
    torch.manual_seed(0)  # random weights are then the same ones when a stopped search goes on
    model: Any = build(prompted(settings.model, data))
    wanted = inputs_for(model, data.name, settings.frame)
    data.transform = evaluation_transform(wanted, normalise=False)
    loader = DataLoader(spread(data, settings.images), settings.batch_size, num_workers=settings.workers)
    batches = []
    with progress(len(loader), "reading images", every_seconds=10, quiet=quiet) as advance:
        for images, labels in loader:
            # What workers send lies in shared memory, with open files for as long as it is kept.
            batches.append((images.clone(), labels.clone()))
            advance(f"{len(images)} images")
    pixels, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    known = not data.multi_label and len(data.classes) == class_count(model)

    def output(model: nn.Module, images: Tensor) -> Tensor:
        # Bytes until here: they take a quarter of the memory.
        return features_in(model(wanted.normalise(images).to(dtype)))

    return model.to(device, dtype), [(pixels, targets)] if known else [pixels], output


def tune_on_folder(folder: EvaluationSettings, *, settings: TuneSettings | None = None, **how: Any) -> Tuned:
    """Tune a classifier on images of a folder.

    `settings` and `how` are as for `agglo.tune`, but for output, batch size and name, which are the classifier's.
    """
    settings = TuneSettings() if settings is None else settings
    model, images, output = prepare(folder, quiet=settings.quiet)
    settings = replace(settings, output=output, name=folder.model.name, batch_size=folder.batch_size)
    with torch_threads(folder.threads):
        return tune(model, images, settings=settings, **how)
