"""AP and speed of one detector: dense, and reduced in every way asked for. A run that was stopped goes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo.detection.data import make_scenes, open_coco, transforms_for
from agglo.detection.data.transforms import LONGEST, TEST_SHORT_SIDE
from agglo.detection.evaluation.one_pass import Images, evaluate
from agglo.detection.specs import open_detector
from agglo.experiments.checkpoints import fingerprint
from agglo.experiments.devices import dtype_named
from agglo.experiments.evaluation.cells import Cell, Reducible
from agglo.experiments.evaluation.grid import Grid, about_data, run_grid
from agglo.experiments.evaluation.record import Record
from agglo.experiments.evaluation.turns import speeds_in_turns
from agglo.experiments.files import write_json
from agglo.experiments.progress import progress
from agglo.experiments.variants import Variant

SCENE_SIDE = 112


@dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate, and how.

    model: a name, the folder of a run, or a file of weights; checkpoint: the weights of a name.
    variants: the reductions, each one a cell of the grid.
    dense: whether the detector is also evaluated as it is, first.
    dataset: "coco", or "scenes" made from Fashion-MNIST's files in `data`.
    images: only so many, evenly spread over the data set; None is all. Of scenes: how many; None is 1000.
    image_size: side of the squares that images are made; None is what the model was trained with.
    turns: so many images are run by all cells in turns in the end, for speeds that can be compared; 0 leaves those of
        each cell's own pass. Several processes take no turns.
    detections: folder for the detections of each cell, as COCO results; None writes none.
    """

    model: str
    data: Path
    variants: Sequence[Variant]
    checkpoint: Path | None = None
    dense: bool = True
    dataset: str = "coco"
    split: str = "val"
    images: int | None = None
    image_size: int | None = None
    skip_bad: bool = False
    batch_size: int = 1
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    turns: int = 8
    detections: Path | None = None


def run(settings: EvaluationSettings, json_path: Path | None = None) -> dict[str, Any]:
    """The report of all cells, see `run_grid`."""
    return run_grid(Evaluation, settings, json_path)


class Evaluation(Grid):
    """Of a detector."""

    prepared_by = ("in_words",)

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self.data = open_data(settings)
        self.opened = open_detector(settings.model, settings.checkpoint, n_classes=len(self.data.classes))
        self.model = self.opened.model
        _require_same_classes(self.opened.spec.n_classes, self.opened.spec.classes, self.data)
        self.reducible = Reducible(self.model, self.opened.learned, f"checkpoint {self.opened.weights}")
        self.weights = fingerprint({**self.model.state_dict(), **(self.opened.learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.side = settings.image_size or self.opened.spec.image_size
        _, transform = transforms_for(self.side)
        self.images = Images(
            self.data,
            transform,
            batch_size=settings.batch_size,
            workers=settings.workers,
            accelerator=self.accelerator,
        )

    def evaluate(self, cells: Sequence[Cell], record: Record) -> None:
        size = self.settings.batch_size
        with progress(
            len(self.images) * len(cells), f"batches of {size}", every_seconds=10, quiet=self.quiet
        ) as advance:
            for cell in cells:
                self.reducible.apply(cell.variant)
                found = evaluate(
                    self.model,
                    self.images,
                    accelerator=self.accelerator,
                    advance=lambda images, title=cell.title: advance(title),  # type: ignore[misc]
                    keep=lambda results, title=cell.title: self._keep(title, results),  # type: ignore[misc]
                )
                record.add({**cell.about, **found})

    def _keep(self, title: str, results: list[dict[str, Any]]) -> None:
        if self.settings.detections is not None:
            self.settings.detections.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9.=-]+", "_", title)
            write_json(self.settings.detections / f"{name}.json", results)

    @staticmethod
    def _timed(cell: Cell, record: Record) -> bool:
        found = record.find(cell.about)
        return found is not None and "turns" in found

    def finish(self, cells: Sequence[Cell], record: Record) -> None:
        """Put speeds that can be compared in place of those that were measured one after the other."""
        if self.accelerator is not None or not self.settings.turns or all(self._timed(cell, record) for cell in cells):
            return
        batches, count = [], 0
        for _, pictures, _ in self.images:
            batches.append(pictures)
            count += len(pictures)
            if count >= self.settings.turns:
                break
        variants = [cell.variant for cell in cells]
        speeds = speeds_in_turns(self.model, variants, batches, 1, apply=self.reducible.apply)
        for cell, speed in zip(cells, speeds, strict=True):
            record.change(cell.about, {**speed, "turns": count})

    def about(self) -> dict[str, Any]:
        settings, data = self.settings, self.data
        backbone: Any = self.model.backbone
        height, width = backbone.nominal_size
        prepared = f"short side {TEST_SHORT_SIDE}, longest {LONGEST}" if self.side is None else f"{self.side} squared"
        chosen = data.place if settings.dataset == "scenes" else f"split {settings.split}"
        return {
            "model": {"name": self.opened.name, "weights": self.opened.weights, "fingerprint": self.weights},
            "data": about_data(data, chosen=chosen, root=settings.data, images=len(data)),
            "inputs": {"in_words": f"{prepared}; tokens and GFLOPs of the backbone are for {height} x {width} pixels"},
        }


def open_data(settings: EvaluationSettings) -> Any:
    """The data set to evaluate on."""
    if settings.dataset == "scenes":
        side = settings.image_size or SCENE_SIDE
        return make_scenes(settings.data, settings.images or 1000, 0, settings.split, side)
    if settings.dataset != "coco":
        raise ValueError(f"dataset={settings.dataset!r} is not known; accepted: 'coco', 'scenes'")
    return open_coco(settings.data, settings.split, skip_bad=settings.skip_bad).spread(settings.images)


def _require_same_classes(n_classes: int, names: Sequence[str], data: Any) -> None:
    if n_classes != len(data.classes):
        raise ValueError(
            f"the detector tells {n_classes} classes apart, {data.place} has {len(data.classes)}: a detector trained "
            "on these classes, or data of the detector's, is needed"
        )
    differing = [f"{own!r} is {other!r} there" for own, other in zip(names, data.classes, strict=False) if own != other]
    if differing:
        raise ValueError(f"the detector's classes are not those of {data.place}: {'; '.join(differing[:3])}")
