"""Runs the cells of a study that its record does not hold yet, and writes its tables and figures."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agglo.lab.evaluation.grid import one_of_several
from agglo.lab.paper.output import open_journal, read_results, write_output
from agglo.lab.paper.study import CannotRunError, Result, RunCell, Settings, Study, StudyCell
from agglo.utils.files import remove_unfinished
from agglo.utils.progress import progress


class StudyResults(NamedTuple):
    """Results of all cells that are done, and the cells whose needs are absent."""

    results: Sequence[Result]
    left_out: Sequence[StudyCell]


def run(study: Study, settings: Settings) -> StudyResults:
    """Run what is missing; every cell is on the disk before the next one starts.

    Several processes, started by `accelerate launch` or `torchrun`, run every cell together, as their task divides it.
    """
    cells = study.cells(settings)
    runnable = runnable_cells(study, settings)
    if cells and not runnable:
        absent = [need for need in study.needs(settings.miniature) if not need.is_available(settings)]
        raise ValueError(
            f"{study.name} has nothing to run here: it needs "
            f"{'; '.join(f'{need.kind} {need.name} ({need.about})' for need in absent)}. --data NAME=DIR and "
            "--weights NAME=FILE say where they are, an extra is a package to be installed"
        )
    accelerator = one_of_several(settings.device)
    is_main = accelerator is None or accelerator.is_main_process
    folder = settings.folder(study.name)
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
    journal = open_journal(study, settings, writes=is_main)
    if accelerator is not None:
        accelerator.wait_for_everyone()  # every process has read the file before the first one writes it
    missing = [cell for cell in runnable if cell.about not in journal]
    if missing:
        run_cell = study.open(settings)
        with progress(len(runnable), study.name, start=len(runnable) - len(missing), quiet=not is_main) as advance:
            for cell in missing:
                found = attempt(run_cell, cell)
                journal.add(cell.about, found)
                number = next((f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, float)), "")
                title = ", ".join(str(value) for value in cell.about.values() if value is not None)
                advance(f"{title}: {'cannot' if 'cannot' in found else number or 'done'}")
    if is_main:
        write_output(study, read_results(folder), settings)  # with what earlier runs found, of more seeds, say
    results = [kept for cell in cells if (kept := journal.find(cell.about)) is not None]
    return StudyResults(results, [cell for cell in cells if cell not in runnable])


def runnable_cells(study: Study, settings: Settings) -> list[StudyCell]:
    return [cell for cell in study.cells(settings) if all(need.is_available(settings) for need in cell.needs)]


def attempt(run_cell: RunCell, cell: StudyCell) -> dict[str, object]:
    """Return what a cell found, or why it cannot be run."""
    try:
        return dict(run_cell(cell.about))
    except CannotRunError as error:
        return {"cannot": str(error)}
    except (RuntimeError, MemoryError) as error:
        reason = str(error)
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not out_of_memory and not any(word in reason.lower() for word in ("alloc", "out of memory")):
            raise
    gc.collect()  # what the failed cell held is let go before the next one starts
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"cannot": f"out of memory: {reason.partition(chr(10))[0]}"}
