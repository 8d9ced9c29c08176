"""Accuracy and speed of one model: dense, and reduced in every way asked for. A run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from agglo.classification.data import ClassificationData, detect, open_split
from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.classification.evaluation.metrics import metric_for
from agglo.classification.evaluation.one_pass import evaluate
from agglo.classification.evaluation.prompts import prompted
from agglo.experiments.checkpoints import Checkpoint, fingerprint
from agglo.experiments.devices import dtype_named
from agglo.experiments.evaluation.cells import Cell, Reducible
from agglo.experiments.evaluation.grid import Grid, about_data, run_grid
from agglo.experiments.evaluation.record import Record
from agglo.experiments.image_store import GIGABYTE, ImageStore
from agglo.experiments.libraries import class_count
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.progress import progress
from agglo.experiments.variants import Variant


@dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate, and how.

    variants: the reductions, each one a cell of the grid.
    dense: whether the model is also evaluated as it is, first.
    dataset: one of `data.dataset_names()`; None finds out by the files.
    images: only so many, evenly spread over the data set; None is all.
    crop: fraction of the resized picture that is left; None is what `frame` says.
    frame: how pictures are resized and cropped, "study" or "model"; see `inputs_for`.
    cache_gigabytes: images are decoded once and kept up to so much memory per process, otherwise decoded for each cell.
    """

    model: ModelSpec
    data: Path
    variants: Sequence[Variant]
    dense: bool = True
    dataset: str | None = None
    images: int | None = None
    crop: float | None = None
    frame: str | None = None
    skip_bad: bool = False
    batch_size: int = 64
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    cache_gigabytes: float = 4.0


def run(settings: EvaluationSettings, json_path: Path | None = None) -> dict[str, Any]:
    """The report of all cells, see `run_grid`."""
    return run_grid(Evaluation, settings, json_path)


class Evaluation(Grid):
    """Of a classifier."""

    prepared_by = ("image_size", "mean", "std", "interpolation", "crop", "squash")

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        self.settings = settings
        name = detect(settings.data) if settings.dataset is None else settings.dataset
        self.data = open_split(name, settings.data, "val", skip_bad=settings.skip_bad)
        self.spec = spec = prompted(settings.model, self.data)
        checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
        self.model = build(spec, checkpoint)
        require_same_classes(self.model, self.data)
        # What a method learned; None where the model's own weights are random too.
        learned = None if spec.has_random_weights else {} if checkpoint is None else dict(checkpoint.method)
        self.reducible = Reducible(self.model, learned, f"checkpoint {self._weights_in_words()}")
        self.weights = fingerprint({**self.model.state_dict(), **(learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.inputs = inputs_for(self.model, name, settings.frame)
        if settings.crop is not None:
            self.inputs = replace(self.inputs, crop=settings.crop, squash=False)
        self.data.transform = evaluation_transform(self.inputs, normalise=False)
        self.images = spread(self.data, settings.images)

    def evaluate(self, cells: Sequence[Cell], record: Record) -> None:
        if not cells:
            return
        size, store = self.settings.batch_size, self.store
        keep = len(cells) > 1 and self.fits_in_memory
        steps = len(store.loader()) * (len(cells) + keep)
        with progress(steps, f"batches of {size}", every_seconds=10, quiet=self.quiet) as advance:
            if keep:
                store.keep(lambda images: advance("reading images"))
            for cell in cells:
                record.add({**cell.about, **self._measured(cell, partial(_advance, advance, cell.title))})

    @cached_property
    def store(self) -> ImageStore:
        size, workers = self.settings.batch_size, self.settings.workers
        return ImageStore(self.images, size, workers=workers, accelerator=self.accelerator)

    @property
    def fits_in_memory(self) -> bool:
        return self.store.bytes_needed <= self.settings.cache_gigabytes * GIGABYTE

    def one(self, variant: Variant | None) -> dict[str, Any]:
        """The result of one cell, for callers who keep results themselves; images stay for the next one, if they fit.

        variant: None is the dense model. ValueError says why one cannot run.
        """
        reduced = [] if variant is None else [variant]
        cell = self.reducible.cells(reduced, dense=variant is None)[0]
        if self.fits_in_memory and not self.store.kept:
            self.store.keep(lambda images: None)
        return {**cell.about, **self._measured(cell, None)}

    def _measured(self, cell: Cell, advance: Callable[[int], None] | None) -> dict[str, Any]:
        self.reducible.apply(cell.variant)
        return evaluate(
            self.model,
            self.store.loader(),
            metric_for(self.data.multi_label),
            accelerator=self.accelerator,
            prepare=Normalise(self.inputs.mean, self.inputs.std),
            advance=advance,
        )

    def _weights_in_words(self) -> str:
        spec = self.settings.model
        return "random" if spec.has_random_weights else "pretrained" if spec.takes_own_weights else str(spec.checkpoint)

    def about(self) -> dict[str, Any]:
        settings = self.settings
        chosen = "found by its files" if settings.dataset is None else "as asked"
        weights = self._weights_in_words()
        prompts = self.spec.prompts
        asked = {} if prompts is None else {"classes": prompts.class_names, "templates": prompts.templates}
        model = {"name": settings.model.name, "weights": weights, "fingerprint": self.weights}
        return {
            "model": {**model, **({"prompts": asked} if asked else {})},
            "data": about_data(self.data, chosen=chosen, root=settings.data, images=len(self.images)),
            "inputs": {**asdict(self.inputs), "in_words": str(self.inputs)},
        }


def _advance(advance: Callable[[str], None], title: str, images: int) -> None:
    advance(title)


def spread(data: ClassificationData, images: int | None) -> Any:
    """So many images, evenly spread over the data set; None is all."""
    if images is None or images >= len(data):
        return data
    return Subset(data, [index * len(data) // images for index in range(images)])


def require_same_classes(model: Any, data: ClassificationData) -> None:
    """ValueError unless a model tells as many classes apart as the data has, as far as the model says."""
    classes = class_count(model)
    if not classes:
        raise ValueError(
            f"{type(model).__name__} has no head: give --checkpoint, of a classifier of these classes, or "
            "--zero-shot for a model of images and texts"
        )
    if classes != len(data.classes):
        hint = "; --dataset folder numbers the folders there are" if data.name == "imagenet" else ""
        raise ValueError(
            f"the model tells {classes} classes apart, {data.name} has {len(data.classes)}: a checkpoint "
            f"trained on these classes, or data of the model's, is needed{hint}"
        )
