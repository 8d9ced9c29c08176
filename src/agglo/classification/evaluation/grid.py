"""Accuracy and speed of one model: dense, and reduced in every way asked for. A run that was stopped goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from agglo.classification.data import ClassificationData, detect, open_split
from agglo.classification.data.image_store import GIGABYTE, ImageStore
from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.classification.evaluation.metrics import metric_for
from agglo.classification.evaluation.one_pass import evaluate
from agglo.classification.evaluation.record import Record
from agglo.experiments.checkpoints import Checkpoint, fingerprint, load_method
from agglo.experiments.devices import dtype_named, require_device, torch_threads
from agglo.experiments.files import require_output
from agglo.experiments.machine import machine
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.progress import progress
from agglo.experiments.variants import Variant
from agglo.patching import apply, reduction, remove

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate, and how.

    variants: the reductions, each one a cell of the grid.
    dense: whether the model is also evaluated as it is, first.
    dataset: one of `data.dataset_names()`; None finds out by the files.
    images: only so many, evenly spread over the data set; None is all.
    crop: fraction of the resized picture that is left; None is the data set's protocol.
    cache_gigabytes: images are decoded once and kept up to so much memory per process, otherwise decoded for each cell.
    """

    model: ModelSpec
    data: Path
    variants: Sequence[Variant]
    dense: bool = True
    dataset: str | None = None
    images: int | None = None
    crop: float | None = None
    skip_bad: bool = False
    batch_size: int = 64
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    cache_gigabytes: float = 4.0


def run(settings: EvaluationSettings, json_path: Path | None = None) -> dict[str, Any]:
    """The report: what ran, on what, and one result per cell. Cells that the JSON file already holds are not run again;
    it is written after every cell. Started by `accelerate launch` or `torchrun`, all processes call this."""
    dtype_named(settings.dtype)  # an unknown name raises before anything is read
    if json_path is not None:
        require_output(json_path)
    with torch_threads(settings.threads):
        return Evaluation(settings).run(json_path)


@dataclass(frozen=True)
class Cell:
    """One row of the table. about: what tells it from the others. reason: why it cannot run, if it cannot."""

    about: dict[str, Any]
    variant: Variant | None = None
    reason: str | None = None

    @property
    def title(self) -> str:
        return self.about["name"] if self.variant is None else f"{self.about['name']}, {self.variant.budget_text}"


class Evaluation:
    """One model and one data set, ready to be evaluated in every way."""

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        self.accelerator = _accelerator(settings.device)
        self.device = require_device(settings.device) if self.accelerator is None else self.accelerator.device
        name = detect(settings.data) if settings.dataset is None else settings.dataset
        self.data = open_split(name, settings.data, "val", skip_bad=settings.skip_bad)
        torch.manual_seed(0)  # random weights are then the same ones when a stopped run goes on
        spec = settings.model
        checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
        self.model = build(spec, checkpoint)
        _require_same_classes(self.model, self.data)
        # What a method learned; None where the model's own weights are random too.
        self.learned = None if spec.has_random_weights else {} if checkpoint is None else dict(checkpoint.method)
        self.weights = fingerprint({**self.model.state_dict(), **(self.learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.inputs = inputs_for(self.model, name)
        if settings.crop is not None:
            self.inputs = replace(self.inputs, crop=settings.crop, squash=False)
        self.data.transform = evaluation_transform(self.inputs, normalise=False)
        self.images = _spread(self.data, settings.images)

    def run(self, json_path: Path | None) -> dict[str, Any]:
        cells = self._cells()
        record = Record(self._about(), json_path, self.accelerator)
        record.add_cannot([{**cell.about, "cannot": cell.reason} for cell in cells if cell.reason is not None])
        self._evaluate([cell for cell in cells if cell.reason is None and record.find(cell.about) is None], record)
        results = [record.find(cell.about) or {**cell.about, "cannot": cell.reason} for cell in cells]
        return {**record.about, "results": results}

    def _cells(self) -> list[Cell]:
        """Every cell with its token counts; one that cannot run says why, unless none can."""
        reduced = [self._cell(variant) for variant in self.settings.variants]
        if reduced and all(cell.reason is not None for cell in reduced):
            raise ValueError(reduced[0].reason)
        return ([self._dense()] if self.settings.dense else []) + reduced

    def _cell(self, variant: Variant) -> Cell:
        about: dict[str, Any] = {
            "name": variant.name,
            "method": variant.method_text,
            **variant.budget,
            "blocks": None if variant.blocks is None else list(variant.blocks),
            "proportional": variant.proportional,
        }
        try:
            self._apply(variant)
        except ValueError as error:
            return Cell(about, variant, str(error))
        found = reduction(self.model)
        assert found is not None
        counted = {"counts": found.counts, "varies": found.varies, "gflops": found.gflops_after}
        return Cell({**about, **counted}, variant)

    def _dense(self) -> Cell:
        # What keeps every token costs what the dense model costs, and says how many there are.
        apply(self.model, "atc", keep_rate=1.0)
        found = reduction(self.model)
        assert found is not None
        about = {"name": "dense", "method": None, "keep_rate": None, "blocks": None, "proportional": None}
        return Cell({**about, "counts": found.counts, "varies": "no", "gflops": found.gflops_before})

    def _apply(self, variant: Variant | None) -> None:
        """The model as a cell wants it, and chance where it starts for every cell."""
        torch.manual_seed(0)
        remove(self.model)
        if variant is not None:
            variant.apply(self.model)
            if self.learned is not None:
                load_method(self.model, self.learned, f"checkpoint {self._weights_in_words()}")

    def _evaluate(self, cells: Sequence[Cell], record: Record) -> None:
        if not cells:
            return
        size, quiet = self.settings.batch_size, self.accelerator is not None and not self.accelerator.is_main_process
        store = ImageStore(self.images, size, workers=self.settings.workers, accelerator=self.accelerator)
        keep = len(cells) > 1 and store.bytes_needed <= self.settings.cache_gigabytes * GIGABYTE
        steps = len(store.loader()) * (len(cells) + keep)
        with progress(steps, f"batches of {size}", every_seconds=10, quiet=quiet) as advance:
            if keep:
                store.keep(lambda images: advance("reading images"))
            for cell in cells:
                self._apply(cell.variant)
                found = evaluate(
                    self.model,
                    store.loader(),
                    metric_for(self.data.multi_label),
                    accelerator=self.accelerator,
                    prepare=Normalise(self.inputs.mean, self.inputs.std),
                    advance=lambda images, title=cell.title: advance(title),  # type: ignore[misc]
                )
                record.add({**cell.about, **found})
        remove(self.model)

    def _weights_in_words(self) -> str:
        spec = self.settings.model
        return "random" if spec.has_random_weights else "pretrained" if spec.pretrained else str(spec.checkpoint)

    def _about(self) -> dict[str, Any]:
        settings, data = self.settings, self.data
        weights = self._weights_in_words()
        return {
            "machine": machine(self.device),
            "model": {"name": settings.model.name, "weights": weights, "fingerprint": self.weights},
            "data": {
                "name": data.name,
                "chosen": "found by its files" if settings.dataset is None else "as asked",
                "root": str(settings.data),
                "images": len(self.images),
                "classes": len(data.classes),
                "fingerprint": data.fingerprint(),
                "skipped": data.skipped,
                "remarks": data.remarks,
            },
            "inputs": {**asdict(self.inputs), "in_words": str(self.inputs)},
            "settings": {
                "batch_size": settings.batch_size,
                "dtype": settings.dtype,
                "device": self.device.type,
                "threads": torch.get_num_threads(),
                "processes": 1 if self.accelerator is None else self.accelerator.num_processes,
            },
        }


def _accelerator(device: str) -> Accelerator | None:
    """One if this is one of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import Accelerator

    # What Accelerate was configured for is training: precision is here what --dtype says.
    return Accelerator(cpu=torch.device(device).type == "cpu", mixed_precision="no")


def _spread(data: ClassificationData, images: int | None) -> Any:
    if images is None or images >= len(data):
        return data
    return Subset(data, [index * len(data) // images for index in range(images)])


def _require_same_classes(model: Any, data: ClassificationData) -> None:
    if model.num_classes != len(data.classes):
        hint = "; --dataset folder numbers the folders there are" if data.name == "imagenet" else ""
        raise ValueError(
            f"the model tells {model.num_classes} classes apart, {data.name} has {len(data.classes)}: a checkpoint "
            f"trained on these classes, or data of the model's, is needed{hint}"
        )
