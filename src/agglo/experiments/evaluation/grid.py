"""A grid of cells, evaluated one after the other: a run that was stopped goes on with the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from agglo.experiments.devices import dtype_named, require_device, torch_threads
from agglo.experiments.evaluation.cells import Cell, Reducible, one_of_several
from agglo.experiments.evaluation.record import Record
from agglo.experiments.files import require_output
from agglo.experiments.machine import machine
from agglo.experiments.variants import Variant
from agglo.patching import remove


class GridSettings(Protocol):
    """What the settings of every task's grid hold."""

    @property
    def variants(self) -> Sequence[Variant]: ...
    @property
    def dense(self) -> bool: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...


class Grid(ABC):
    """One model and one data set, ready to be evaluated in every way.

    prepared_by: entries of "inputs" in the report in which a record must agree with an earlier one.
    model, reducible: what is evaluated. images: what on; len says how many.
    """

    prepared_by: ClassVar[Sequence[str]]
    model: nn.Module
    reducible: Reducible

    def __init__(self, settings: GridSettings) -> None:
        self.accelerator = one_of_several(settings.device)
        self.device = require_device(settings.device) if self.accelerator is None else self.accelerator.device
        self._grid = settings
        torch.manual_seed(0)  # random weights are then the same ones when a stopped run goes on

    @property
    def quiet(self) -> bool:
        """Whether another process shows the progress."""
        return self.accelerator is not None and not self.accelerator.is_main_process

    def run(self, json_path: Path | None) -> dict[str, Any]:
        """The report: what ran, on what, and one result per cell."""
        cells = self.reducible.cells(self._grid.variants, dense=self._grid.dense)
        about = {"machine": machine(self.device), **self.about(), "settings": self._settings()}
        record = Record(about, json_path, self.accelerator, inputs=self.prepared_by)
        record.add_cannot([{**cell.about, "cannot": cell.reason} for cell in cells if cell.reason is not None])
        able = [cell for cell in cells if cell.reason is None]
        self.evaluate([cell for cell in able if record.find(cell.about) is None], record)
        self.finish(able, record)
        remove(self.model)
        results = [record.find(cell.about) or {**cell.about, "cannot": cell.reason} for cell in cells]
        return {**record.about, "results": results}

    def _settings(self) -> dict[str, Any]:
        return {
            "batch_size": self._grid.batch_size,
            "dtype": self._grid.dtype,
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "processes": 1 if self.accelerator is None else self.accelerator.num_processes,
        }

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Model, data and inputs, for the report."""

    @abstractmethod
    def evaluate(self, cells: Sequence[Cell], record: Record) -> None:
        """Put the result of each cell into the record as soon as it is there."""

    def finish(self, cells: Sequence[Cell], record: Record) -> None:  # noqa: B027 most have nothing to do
        """Called when all cells that can run have results."""


def about_data(data: Any, *, chosen: str, root: Path, images: int) -> dict[str, Any]:
    """A data set, for the report. chosen: how it was."""
    return {
        "name": data.name,
        "chosen": chosen,
        "root": str(root),
        "images": images,
        "classes": len(data.classes),
        "fingerprint": data.fingerprint(),
        "skipped": data.skipped,
        "remarks": data.remarks,
    }


def run_grid(make: Callable[[Any], Grid], settings: GridSettings, json_path: Path | None) -> dict[str, Any]:
    """The report of a grid. Cells that the JSON file already holds are not run again; it is written after every cell.
    Started by `accelerate launch` or `torchrun`, all processes call this."""
    dtype_named(settings.dtype)  # an unknown name raises before anything is read
    if json_path is not None:
        require_output(json_path)
    with torch_threads(settings.threads):
        return make(settings).run(json_path)
