"""What an item has found so far, in a file that survives a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from agglo.experiments.evaluation.record import processor
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.reproduce.item import Cell, Result, key_of

FILE = "record.json"
# What decides which model and which images a cell is about; and what of its result must then be the same in all others.
_SUBJECT = ("training", "part", "model", "data", "seed")
_SOURCES = {
    "weights": "weights",
    "weights_with_token": "weights",
    "data_fingerprint": "images",
    "batch_size": "batches",
}


class ItemRecord:
    """Results in the order they were found, by the keys of their cells.

    writes: whether this process is the one that writes, of several that run the same cells together.
    """

    def __init__(self, path: Path, item: str, *, miniature: bool, device: str = "cpu", writes: bool = True) -> None:
        self._path, self._writes, self._device = path, writes, torch.device(device)
        self._head: dict[str, Any] = {"item": item, "miniature": miniature}
        self._results: dict[str, Result] = {}
        if path.exists():
            self._head, self._results = self._continued()

    def find(self, cell: Cell) -> Result | None:
        return self._results.get(cell.key)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell.key not in self._results]

    def results(self, cells: Iterable[Cell]) -> list[Result]:
        """Of those cells that are done, in their order."""
        return [found for cell in cells if (found := self.find(cell)) is not None]

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keep a result, with where and when it was found. ValueError if others of the record are of other weights or
        images that go by the same name: one table is not to mix them."""
        self._require_same_sources(cell, found)
        here = machine(self._device)
        self._head["machine"] = here
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = {**cell.about, **found, "processor": processor(here), "date": now}
        self._results[cell.key] = json.loads(json.dumps({"cell": dict(cell.about), **result}))
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {**self._head, "results": list(self._results.values())})

    def _require_same_sources(self, cell: Cell, found: Mapping[str, Any]) -> None:
        subject = [cell.about.get(name) for name in _SUBJECT]
        for before in self._results.values():
            if [before["cell"].get(name) for name in _SUBJECT] != subject:
                continue
            for name, what in _SOURCES.items():
                then, now = before.get(name), found.get(name)
                if None not in (then, now) and then != now:
                    raise ValueError(
                        f"{str(self._path)!r} holds results of other {what} of the same name ({then}, and {now} now); "
                        "choose another --output, or remove it"
                    )

    def _continued(self) -> tuple[dict[str, Any], dict[str, Result]]:
        try:
            before = json.loads(self._path.read_text(encoding="utf-8"))
            results = {key_of(result["cell"]): result for result in before.pop("results")}
            same = all(before[name] == self._head[name] for name in ("item", "miniature"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{str(self._path)!r} is no record of `agglo reproduce`; remove it, or choose another --output"
            ) from error
        if not same:
            raise ValueError(f"{str(self._path)!r} is of another item: {before['item']!r}; choose another --output")
        return before, results


def read_results(folder: Path) -> list[Result]:
    """All results of an item's folder; none if it has not been run."""
    path = folder / FILE
    if not path.exists():
        return []
    results: list[Result] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


def where(results: Sequence[Result]) -> str:
    """Processors and dates of results, in words."""
    on = sorted({result["processor"] for result in results if result.get("processor")})
    dates = sorted({result["date"][:10] for result in results if result.get("date")})
    span = dates if len(dates) < 3 else [dates[0], dates[-1]]
    return f"{' and '.join(on)}, {' to '.join(span)}" if on else "not run yet"
