"""Tuning of a classifier by its name, on images of a folder, prepared as `agglo evaluate` prepares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from agglo.lab.tasks.classification.evaluation.grid import Evaluation, EvaluationSettings
from agglo.models.libraries import class_count
from agglo.models.outputs import features_in
from agglo.tuning import Tuned, TuneSettings, tune
from agglo.tuning.settings import Output
from agglo.utils.devices import dtype_named, torch_threads
from agglo.utils.progress import progress


def prepare(settings: EvaluationSettings, *, quiet: bool = False) -> tuple[nn.Module, list[Any], Output]:
    """Build the model and read the images.

    Returns:
        The model; one batch of images (N, C, H, W), as bytes, with classes (N,) if the data set's are those of the
        model; and the function that gives logits, or the features of a model without a head.
    """
    opened = Evaluation(settings)
    batches = -(-len(opened.images) // settings.batch_size)
    with progress(batches, "reading images", every_seconds=10, quiet=quiet) as advance:
        opened.keep_images(lambda title: advance(""))
    pixels, targets = (torch.stack(parts) for parts in zip(*opened.images, strict=True))
    known = not opened.data.multi_label and len(opened.data.classes) == class_count(opened.model)
    inputs, dtype = opened.inputs, dtype_named(settings.dtype)

    def output(model: nn.Module, images: Tensor) -> Tensor:
        # Bytes until here: they take a quarter of the memory.
        return features_in(model(inputs.normalise(images).to(dtype)))

    return opened.model, [(pixels, targets)] if known else [pixels], output


def tune_on_folder(folder: EvaluationSettings, *, settings: TuneSettings | None = None, **how: Any) -> Tuned:
    """Tune a classifier on images of a folder.

    `settings` and `how` are as for `agglo.tune`, but for output, batch size and name, which are the classifier's.
    """
    settings = TuneSettings() if settings is None else settings
    model, images, output = prepare(folder, quiet=settings.quiet)
    settings = replace(settings, output=output, name=folder.model.name, batch_size=folder.batch_size)
    with torch_threads(folder.threads):
        return tune(model, images, settings=settings, **how)
