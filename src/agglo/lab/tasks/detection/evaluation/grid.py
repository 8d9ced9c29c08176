"""AP and speed of one detector, dense and with each reduction, in tables and plots; a stopped run resumes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agglo.checks import choice
from agglo.lab.evaluation import report as reports
from agglo.lab.evaluation.configs import Configs, budget_of
from agglo.lab.evaluation.grid import EvaluationGrid, GridCell, Reducible, about_data
from agglo.lab.evaluation.report import TaskMetrics
from agglo.lab.tasks.detection.data import make_scenes, open_coco, transforms_for
from agglo.lab.tasks.detection.data.transforms import LONGEST, TEST_SHORT_SIDE
from agglo.lab.tasks.detection.evaluation.average_precision import KINDS, NUMBERS, DetectionBatches, evaluate
from agglo.lab.tasks.detection.specs import open_detector
from agglo.models.checkpoints import fingerprint
from agglo.utils.devices import dtype_named
from agglo.utils.files import write_json
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import speeds_in_turns

METRICS = TaskMetrics({"box_AP": "box AP", "mask_AP": "mask AP"}, ("box_AP", "mask_AP"))


@dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate, and how."""

    model: str  # and checkpoint: as `open_detector` takes them
    data: Path  # a folder or a JSON file of dataset "coco", or for "scenes" the folder of Fashion-MNIST's files
    configs: Configs  # the reductions, each one a cell of the grid, with their names
    checkpoint: Path | None = None
    dense: bool = True  # evaluate without reduction too, first
    dataset: str = "coco"
    split: str = "val"
    images: int | None = None  # so many, evenly spread; None is all. Of scenes: how many; None is 1000
    image_size: int | None = None  # side of the squares that images become; None is what the model was trained with
    batch_size: int = 1
    workers: int = 2
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    turns: int = 8  # images that all cells run in turns in the end, for speeds that can be compared; 0 is none
    detections: Path | None = None  # folder for the detections of each cell, as COCO results


class Evaluation(EvaluationGrid):
    """A detector and a data set, ready to be evaluated in every way."""

    prepared_by = ("in_words",)

    def __init__(self, settings: EvaluationSettings) -> None:
        super().__init__(settings)
        self.data: Any
        if choice("dataset", settings.dataset, ("coco", "scenes")) == "scenes":
            count, side = settings.images or 1000, settings.image_size or 112
            self.data = make_scenes(settings.data, count, 0, settings.split, side)
        else:
            self.data = open_coco(settings.data, settings.split).spread(settings.images)
        self.opened = open_detector(settings.model, settings.checkpoint, n_classes=len(self.data.classes))
        self.model = self.opened.model
        _require_same_classes(self.opened.spec.n_classes, self.opened.spec.classes, self.data)
        self.reducible = Reducible(self.model, self.opened.learned, f"checkpoint {self.opened.weights}")
        self.weights = fingerprint({**self.model.state_dict(), **(self.opened.learned or {})})
        self.model.to(self.device, dtype_named(settings.dtype))
        self.side = settings.image_size or self.opened.spec.image_size
        how: Any = {"batch_size": settings.batch_size, "workers": settings.workers, "accelerator": self.accelerator}
        self.images = DetectionBatches(self.data, transforms_for(self.side)[1], **how)

    def evaluate(self, cells: Sequence[GridCell], journal: Journal) -> None:
        count, what = len(self.images) * len(cells), f"batches of {self.settings.batch_size}"
        with progress(count, what, every_seconds=10, quiet=self.quiet) as advance:
            for cell in cells:
                self.reducible.apply(cell.config)
                told = {"advance": partial(advance, cell.title), "keep": partial(self._keep, cell.title)}
                found = evaluate(self.model, self.images, accelerator=self.accelerator, **told)
                journal.add(cell.key, {**cell.about, **found})

    def _keep(self, title: str, results: list[dict[str, Any]]) -> None:
        if self.settings.detections is not None:
            self.settings.detections.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9.=-]+", "_", title)
            write_json(self.settings.detections / f"{name}.json", results)

    def finish(self, cells: Sequence[GridCell], journal: Journal) -> None:
        """Replace speeds that were measured one after the other by speeds that can be compared."""
        found = [journal.find(cell.key) or {} for cell in cells]
        timed = all("turns" in result for result in found)
        if self.accelerator is not None or not self.settings.turns or timed:
            return
        batches: list[Any] = []
        for images, _ in self.images:
            batches.append(images)
            if (count := sum(map(len, batches))) >= self.settings.turns:
                break
        speeds = speeds_in_turns(self.model, [cell.config for cell in cells], batches, 1, self.reducible.apply)
        for cell, result, speed in zip(cells, found, speeds, strict=True):
            journal.add(cell.key, {**result, **speed, "turns": count})

    def about(self) -> dict[str, Any]:
        settings, data = self.settings, self.data
        backbone: Any = self.model.backbone
        height, width = backbone.nominal_size
        prepared = f"short side {TEST_SHORT_SIDE}, longest {LONGEST}" if self.side is None else f"{self.side} squared"
        chosen = data.description if settings.dataset == "scenes" else f"split {settings.split}"
        return {
            "model": {"name": self.opened.name, "weights": self.opened.weights, "fingerprint": self.weights},
            "data": about_data(data, chosen=chosen, root=settings.data, images=len(data)),
            "inputs": {"in_words": f"{prepared}; tokens and GFLOPs of the backbone are for {height} x {width} pixels"},
        }


def _require_same_classes(n_classes: int, names: Sequence[str], data: Any) -> None:
    if n_classes != len(data.classes):
        raise ValueError(f"the detector tells {n_classes} classes apart, {data.description} has {len(data.classes)}")
    differing = [f"{own!r} is {other!r} there" for own, other in zip(names, data.classes, strict=False) if own != other]
    if differing:
        raise ValueError(f"the detector's classes are not those of {data.description}: {'; '.join(differing[:3])}")


def text(report: dict[str, Any]) -> str:
    """Return tables for a terminal: a row for each cell, methods by keep rates, and all of COCO's numbers."""
    rows = [
        [result["name"], budget_of(result), kind, *(result[f"{kind}_{name}"] for name in NUMBERS)]
        for result in report["results"]
        if "cannot" not in result
        for kind in KINDS.values()
    ]
    columns = [Column(title, left=True) for title in ("method", "budget", "of")]
    all_numbers = Table([*columns, *(Column(name, ".1f") for name in NUMBERS)], rows)
    return f"{reports.text(report, METRICS)}\n\n{all_numbers.text()}"
