"""A grid of cells, evaluated one after the other; a run that was stopped continues with the next cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from agglo.lab.evaluation.cells import Cell, Reducible, one_of_several
from agglo.patch import remove
from agglo.utils.devices import dtype_named, require_device, torch_threads
from agglo.utils.files import require_output
from agglo.utils.journal import Journal, plain
from agglo.utils.machine import machine

# Speeds of several batch sizes do not belong into one table, nor accuracies of several data sets. Another machine may
# go on: every result says which processor it ran on, and reports compare speeds of one processor only.
_SAME = ("model.name", "model.fingerprint", "data.name", "data.images", "data.fingerprint", "settings")


class Grid(ABC):
    """One model and one data set, ready to be evaluated dense and reduced.

    Attributes:
        prepared_by: Entries of "inputs" in the report in which a journal must agree with an earlier run.
        model: The model that is evaluated.
        reducible: The same, to be reduced in one way after another.

    The settings of every task have configs, dense, batch_size, threads, device and dtype.
    """

    prepared_by: ClassVar[Sequence[str]]
    model: nn.Module
    reducible: Reducible

    def __init__(self, settings: Any) -> None:
        self.accelerator = one_of_several(settings.device)
        self.device = require_device(settings.device) if self.accelerator is None else self.accelerator.device
        self._grid = settings
        torch.manual_seed(0)  # random weights are then the same ones when a stopped run goes on

    @property
    def quiet(self) -> bool:
        """Whether this process shows no progress, because the main one does."""
        return self.accelerator is not None and not self.accelerator.is_main_process

    def run(self, json_path: Path | None) -> dict[str, Any]:
        """Evaluate all cells and return the report: model, data, settings, and one result per cell."""
        cells = self.reducible.cells(self._grid.configs, dense=self._grid.dense)
        settings = {
            "batch_size": self._grid.batch_size,
            "dtype": self._grid.dtype,
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "processes": 1 if self.accelerator is None else self.accelerator.num_processes,
        }
        about = {"machine": machine(self.device), **self.about(), "settings": settings}
        same = (*_SAME, *(f"inputs.{name}" for name in self.prepared_by))
        journal = Journal(json_path, about, same=same, writes=not self.quiet)
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()  # all processes have read the file before the first one writes it
        cannot = [{**cell.about, "cannot": cell.reason} for cell in cells if cell.reason is not None]
        known = journal.header.get("cannot", [])
        journal.header["cannot"] = [*known, *(cell for cell in plain(cannot) if cell not in known)]
        if cannot and journal.results:
            journal.write()
        able = [cell for cell in cells if cell.reason is None]
        self.evaluate([cell for cell in able if cell.key not in journal], journal)
        self.finish(able, journal)
        remove(self.model)
        results = [journal.find(cell.key) or {**cell.about, "cannot": cell.reason} for cell in cells]
        return {**journal.header, "results": results}

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return the entries "model", "data" and "inputs" of the report."""

    @abstractmethod
    def evaluate(self, cells: Sequence[Cell], journal: Journal) -> None:
        """Add the result of each cell to the journal as soon as it is there."""

    def finish(self, cells: Sequence[Cell], journal: Journal) -> None:  # noqa: B027 most have nothing to do
        """Do what is left when all cells that can run have results."""


def about_data(data: Any, *, chosen: str, root: Path, images: int) -> dict[str, Any]:
    """Return the entry of a data set in the report; `chosen` says how it was recognised."""
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


def run_grid(make: Callable[[Any], Grid], settings: Any, json_path: Path | None) -> dict[str, Any]:
    """Evaluate a grid and return its report.

    Cells that the JSON file already holds are not run again; it is written after every cell. Started by
    `accelerate launch` or `torchrun`, all processes call this.
    """
    dtype_named(settings.dtype)  # an unknown name raises before anything is read
    if json_path is not None:
        require_output(json_path)
    with torch_threads(settings.threads):
        return make(settings).run(json_path)
