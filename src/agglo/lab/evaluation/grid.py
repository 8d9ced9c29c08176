"""A grid of cells: one model, dense and reduced in every way asked for; a run that was stopped resumes at the next."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.models.checkpoints import load_method
from agglo.patch import apply, remove, report
from agglo.utils.devices import dtype_named, new_accelerator, require_device, torch_threads
from agglo.utils.files import require_output
from agglo.utils.journal import Journal, plain
from agglo.utils.machine import machine

if TYPE_CHECKING:
    from accelerate import Accelerator

# Speeds of several batch sizes do not belong into one table, nor accuracies of several data sets. Another machine may
# resume: every result says which processor it ran on, and reports compare speeds of one processor only.
_SAME = ("model.name", "model.fingerprint", "data.name", "data.images", "data.fingerprint", "settings")


@dataclass(frozen=True)
class GridCell:
    """One row of the table: what distinguishes it, its config (None if dense), and why it cannot run, if so."""

    about: dict[str, Any]
    config: ReductionConfig | None = None
    reason: str | None = None

    @property
    def key(self) -> dict[str, Any]:
        """The part of `about` by which a journal finds the result."""
        return {name: self.about[name] for name in ("name", "config", "counts") if self.about.get(name) is not None}

    @property
    def title(self) -> str:
        return self.about["name"] if self.config is None else f"{self.about['name']}, {self.config.budget}"


class Reducible:
    """A model that is reduced in one way after another.

    `learned` holds the weights that methods have learned, by name; None where they start afresh, as the model did.
    `source` says in error messages where they come from.
    """

    def __init__(self, model: nn.Module, learned: Mapping[str, Tensor] | None, source: str) -> None:
        self.model, self.learned, self.source = model, learned, source

    def apply(self, config: ReductionConfig | None) -> None:
        """Reduce the model, with the same seed for every config; None is the dense model."""
        torch.manual_seed(0)
        remove(self.model)
        if config is not None:
            apply(self.model, config)
            if self.learned is not None:
                load_method(self.model, self.learned, self.source)

    def cells(self, configs: Mapping[ReductionConfig, str], *, dense: bool) -> list[GridCell]:
        """Return the cells of configs and the names of their rows, after the dense one, with their token counts.

        A cell that cannot run says why; a ValueError is raised if none can.
        """
        reduced = [self._reduced(config, name) for config, name in configs.items()]
        if reduced and all(cell.reason is not None for cell in reduced):
            raise ValueError(reduced[0].reason)
        return ([self._dense()] if dense else []) + reduced

    def _reduced(self, config: ReductionConfig, name: str) -> GridCell:
        about: dict[str, Any] = {"name": name, "config": config.to_dict()}
        try:
            self.apply(config)
            found: Any = report(self.model)
        except ValueError as error:
            return GridCell(about, config, str(error))
        return GridCell({**about, "counts": found.counts, "varies": found.varies, "gflops": found.gflops_after}, config)

    def _dense(self) -> GridCell:
        about: dict[str, Any] = {"name": "dense", "config": None, "counts": None, "varies": "no", "gflops": None}
        remove(self.model)
        try:
            # What keeps every token costs what the dense model costs, and says how many there are.
            found: Any = report(apply(self.model, "atc", keep_rate=1.0))
        except UnsupportedModelError:  # it can be evaluated as it is, all the same
            return GridCell(about)
        return GridCell({**about, "counts": found.counts, "gflops": found.gflops_before})


def one_of_several(device: str) -> Accelerator | None:
    """Return this process's Accelerator if it is one of several, otherwise None."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    # What Accelerate was configured for is training: precision is here what --dtype says.
    return new_accelerator(cpu=torch.device(device).type == "cpu", mixed_precision="no")


class EvaluationGrid(ABC):
    """One model and one data set, ready to be evaluated dense and reduced."""

    prepared_by: ClassVar[Sequence[str]]  # entries of "inputs" in the report in which an earlier run must agree
    model: nn.Module
    reducible: Reducible  # the same model

    def __init__(self, settings: Any) -> None:
        self.settings = settings  # of the task: all have configs, dense, batch_size, threads, device and dtype
        self.accelerator = one_of_several(settings.device)
        self.device = require_device(settings.device) if self.accelerator is None else self.accelerator.device
        torch.manual_seed(0)  # random weights are then the same ones when a stopped run resumes

    @property
    def quiet(self) -> bool:
        """Whether this process shows no progress, because the main one does."""
        return self.accelerator is not None and not self.accelerator.is_main_process

    def run(self, json_path: Path | None) -> dict[str, Any]:
        """Evaluate all cells and return the report: model, data, settings, and one result per cell."""
        cells = self.reducible.cells(self.settings.configs, dense=self.settings.dense)
        settings = {
            "batch_size": self.settings.batch_size,
            "dtype": self.settings.dtype,
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "processes": 1 if self.accelerator is None else self.accelerator.num_processes,
        }
        about = {"machine": machine(self.device), **self.about(), "settings": settings}
        same = (*_SAME, *(f"inputs.{name}" for name in self.prepared_by))
        journal = Journal(json_path, about, same=same, writes=not self.quiet)
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()  # all processes have read the file before the first one writes it
        cannot = plain([{**cell.about, "cannot": cell.reason} for cell in cells if cell.reason is not None])
        known = journal.header.get("cannot", [])
        journal.header["cannot"] = [*known, *(cell for cell in cannot if cell not in known)]
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
    def evaluate(self, cells: Sequence[GridCell], journal: Journal) -> None:
        """Add the result of each cell to the journal as soon as it is there."""

    def finish(self, cells: Sequence[GridCell], journal: Journal) -> None:  # noqa: B027 most have nothing to do
        """Do what is left when all cells that can run have results."""


def about_data(data: Any, *, chosen: str, root: Path, images: int) -> dict[str, Any]:
    """Return the entry of a data set in the report; `chosen` says how it was recognised."""
    about = {"name": data.name, "chosen": chosen, "root": str(root), "images": images, "classes": len(data.classes)}
    return {**about, "fingerprint": data.fingerprint()}


def run_grid(make: Callable[[Any], EvaluationGrid], settings: Any, json_path: Path | None) -> dict[str, Any]:
    """Evaluate a grid and return its report.

    Cells that the JSON file already holds are not run again; it is written after every cell. Started by
    `accelerate launch` or `torchrun`, all processes call this.
    """
    dtype_named(settings.dtype)  # an unknown name raises before anything is read
    if json_path is not None:
        require_output(json_path)
    with torch_threads(settings.threads):
        return make(settings).run(json_path)
