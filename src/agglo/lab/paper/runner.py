"""Runs the cells of a study that its record does not hold yet, and writes its tables and figures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agglo.lab.evaluation.cells import one_of_several
from agglo.lab.paper.output import open_journal, read_results, write_output
from agglo.lab.paper.study import CannotRunError, Cell, Result, RunCell, Settings, Study
from agglo.utils.files import remove_unfinished
from agglo.utils.progress import progress

OUT_OF_MEMORY = "out of memory"
# What allocators say that torch passes on as a RuntimeError.
_ALLOCATORS = ("defaultcpuallocator", "out of memory", "allocate memory", "bad_alloc", "alloc_failed")


class Outcome(NamedTuple):
    """Results of all cells that are done, and the cells whose needs are not here."""

    results: Sequence[Result]
    left_out: Sequence[Cell]


def run(study: Study, settings: Settings) -> Outcome:
    """Run what is missing; every cell is on the disk before the next one starts.

    Several processes, started by `accelerate launch` or `torchrun`, run every cell together, as their task divides it.
    """
    cells = study.cells(settings)
    able = _able(cells, settings)
    if cells and not able:
        absent = [need for need in study.needs(settings.miniature) if not need.is_here(settings)]
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
    missing = [cell for cell in able if cell.about not in journal]
    if missing:
        run_cell = study.open(settings)
        with progress(len(able), study.name, start=len(able) - len(missing), quiet=not is_main) as advance:
            for cell in missing:
                found = attempt(run_cell, cell)
                journal.add(cell.about, found)
                advance(f"{cell.title}: {_summary(found)}")
    results = [kept for cell in cells if (kept := journal.find(cell.about)) is not None]
    if is_main:
        write_output(study, read_results(folder), settings)  # with what earlier runs found, of more seeds, say
    return Outcome(results, [cell for cell in cells if cell not in able])


def is_runnable(study: Study, settings: Settings) -> bool:
    """Return whether what some cell needs is here, or there are no cells."""
    cells = study.cells(settings)
    return not cells or bool(_able(cells, settings))


def _able(cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    return [cell for cell in cells if all(need.is_here(settings) for need in cell.needs)]


def attempt(run_cell: RunCell, cell: Cell) -> dict[str, object]:
    """Return what a cell found, or why it cannot be run."""
    try:
        return dict(run_cell(cell.about))
    except CannotRunError as error:
        return {"cannot": str(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error)
    except RuntimeError as error:
        reason = str(error)
        if not any(words in reason.lower() for words in _ALLOCATORS):
            raise
    # What the failed cell held is let go before the next one starts.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"agglo: {cell.title}: {OUT_OF_MEMORY}", file=sys.stderr)
    first = reason.splitlines()[0] if reason else ""
    return {"cannot": f"{OUT_OF_MEMORY}: {first}" if first else OUT_OF_MEMORY}


def _summary(found: dict[str, object]) -> str:
    """Return the first number of a result, for the progress bar."""
    number = next((f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, float)), "done")
    return "cannot" if "cannot" in found else number
