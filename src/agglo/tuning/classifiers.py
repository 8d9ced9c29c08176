"""A classifier by name, tuned on the images of a folder, prepared as `agglo evaluate` prepares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.classification.data import detect, open_split
from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.classification.evaluation.grid import spread
from agglo.classification.evaluation.prompts import prompted
from agglo.experiments.devices import dtype_named, require_device, torch_threads
from agglo.experiments.image_store import ImageStore
from agglo.experiments.libraries import class_count
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.outputs import features_in
from agglo.experiments.progress import progress
from agglo.tuning.api import tune
from agglo.tuning.result import Tuned


@dataclass(frozen=True)
class FolderSettings:
    """What is tuned, and where. images: evenly spread over the validation split."""

    model: ModelSpec
    data: Path
    dataset: str | None = None
    images: int = 1000
    batch_size: int = 64
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Prepared:
    """A classifier on its device, images as bytes, their labels where the data set has those of the model, and the
    function that gives logits of such images, or features of a model without a head."""

    model: nn.Module
    images: Tensor
    labels: Tensor | None
    output: Callable[[nn.Module, Tensor], Tensor]


def prepare(settings: FolderSettings, *, quiet: bool = False) -> Prepared:
    dtype, device = dtype_named(settings.dtype), require_device(settings.device)
    name = detect(settings.data) if settings.dataset is None else settings.dataset
    data = open_split(name, settings.data, "val")
    torch.manual_seed(0)  # random weights are then the same ones when a stopped search goes on
    model: Any = build(prompted(settings.model, data))
    wanted = inputs_for(model, name)
    data.transform = evaluation_transform(wanted, normalise=False)
    chosen = spread(data, settings.images)
    store = ImageStore(chosen, settings.batch_size, workers=settings.workers)
    pixels: list[Tensor] = []
    targets: list[Tensor] = []
    with progress(len(store.loader()), "reading images", every_seconds=10, quiet=quiet) as advance:
        for images, labels in store.loader():
            # What workers send lies in shared memory, with open files for as long as it is kept.
            pixels.append(images.clone())
            targets.append(labels.clone())
            advance(f"{len(images)} images")
    known = not data.multi_label and len(data.classes) == class_count(model)
    normalise = Normalise(wanted.mean, wanted.std)

    def output(model: nn.Module, images: Tensor) -> Tensor:
        # Bytes until here: they take a quarter of the memory.
        return features_in(model(normalise(images).to(dtype)))

    return Prepared(model.to(device, dtype), torch.cat(pixels), torch.cat(targets) if known else None, output)


def tune_on_folder(settings: FolderSettings, *, quiet: bool = False, **how: Any) -> Tuned:
    """how: further arguments of `tune`. Labels serve the report where the data set has those of the model."""
    ready = prepare(settings, quiet=quiet)
    with torch_threads(settings.threads):
        return tune(
            ready.model,
            ready.images,
            labels=ready.labels,
            output=ready.output,
            objective="kl" if class_count(ready.model) else "auto",
            batch_size=settings.batch_size,
            name=settings.model.name,
            quiet=quiet,
            **how,
        )
