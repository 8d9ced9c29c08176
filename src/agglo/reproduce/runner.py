"""Runs the cells of an item that its record does not hold yet, and writes its tables and pictures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agglo.experiments.evaluation.cells import one_of_several
from agglo.experiments.files import remove_unfinished
from agglo.experiments.progress import progress
from agglo.reproduce.item import CannotRunError, Cell, Item, Result, RunCell, Settings
from agglo.reproduce.output import write_output
from agglo.reproduce.record import FILE, ItemRecord, read_results

OUT_OF_MEMORY = "out of memory"
# What allocators say that torch passes on as a RuntimeError.
_ALLOCATORS = ("defaultcpuallocator", "out of memory", "allocate memory", "bad_alloc", "alloc_failed")


@dataclass(frozen=True)
class Outcome:
    """results: of all cells that are done. left_out: cells whose needs are not here."""

    results: Sequence[Result]
    left_out: Sequence[Cell]


def run(item: Item, settings: Settings) -> Outcome:
    """Run what is missing; every cell is on the disk before the next one starts. Several processes, started by
    `accelerate launch` or `torchrun`, run every cell together, as their task divides it."""
    cells = item.cells(settings)
    able = _able(item, settings, cells)
    if cells and not able:
        raise ValueError(_nothing_to_run(item, settings))
    accelerator = one_of_several(settings.device)
    is_main = accelerator is None or accelerator.is_main_process
    folder = settings.folder(item.name)
    if is_main and folder.exists():
        remove_unfinished(folder)
    record = ItemRecord(folder / FILE, item.name, miniature=settings.miniature, device=settings.device, writes=is_main)
    if accelerator is not None:
        accelerator.wait_for_everyone()  # every process has read the file before the first one writes it
    missing = record.missing(able)
    if missing:
        run_cell = item.open(settings)
        with progress(len(able), item.name, start=len(able) - len(missing), quiet=not is_main) as advance:
            for cell in missing:
                found = attempt(run_cell, cell)
                record.add(cell, found)
                advance(f"{cell.title}: {summary(found)}")
    results = record.results(cells)
    if is_main:
        write_output(item, read_results(folder), settings)  # with what earlier runs found, of more seeds, say
    return Outcome(results, [cell for cell in cells if cell not in able])


def is_runnable(item: Item, settings: Settings) -> bool:
    """Whether what some cell needs is here, or no cell is needed."""
    cells = item.cells(settings)
    return not cells or bool(_able(item, settings, cells))


def _able(item: Item, settings: Settings, cells: Sequence[Cell]) -> list[Cell]:
    here = {need.name for need in item.needs(settings.miniature) if need.is_here(settings)}
    return [cell for cell in cells if here.issuperset(cell.needs)]


def _nothing_to_run(item: Item, settings: Settings) -> str:
    absent = [need for need in item.needs(settings.miniature) if not need.is_here(settings)]
    listed = "; ".join(f"{need.kind} {need.name} ({need.about})" for need in absent)
    return (
        f"{item.name} has nothing to run here: it needs {listed}. --data NAME=DIR and --weights NAME=FILE name "
        "places, an extra is a package to be installed"
    )


def attempt(run_cell: RunCell, cell: Cell) -> dict[str, object]:
    """What a cell found, or why it cannot be run."""
    try:
        return dict(run_cell(cell))
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


def summary(found: dict[str, object]) -> str:
    """The first number of a result, for the progress bar."""
    if "cannot" in found:
        return "cannot"
    name, value = next(((n, v) for n, v in found.items() if isinstance(v, float)), ("", ""))
    return f"{name} {value:.4g}" if isinstance(value, float) else "done"
