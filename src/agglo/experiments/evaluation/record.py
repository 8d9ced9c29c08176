"""What an evaluation has found so far, in a file that survives a crash and is only continued by the same one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agglo.experiments.files import require_output, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

# Speeds of several batch sizes do not belong into one table, nor accuracies of several data sets. Another machine may
# go on: every result says which processor it ran on, and reports compare speeds of one processor only.
_MUST_AGREE = {
    "model": ("name", "fingerprint"),
    "data": ("name", "images", "fingerprint"),
    "settings": ("batch_size", "dtype", "device", "threads", "processes"),
}
_CELL = ("name", "method", "keep_rate", "threshold", "schedule", "blocks", "proportional", "acts", "unread", "counts")


def processor(machine: Mapping[str, Any]) -> str:
    """What a `machine` computes with: its GPU, or else its CPU."""
    return str(machine["gpu"] or machine["cpu"])


class Record:
    """Results in the order they were found, written to the JSON file after each.

    about: everything that is the same for all of them. An existing file must agree with it.
    inputs: the names of its part "inputs", which says how images are prepared, that must be the same too.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        path: Path | None,
        accelerator: Accelerator | None = None,
        *,
        inputs: Sequence[str] = (),
    ) -> None:
        self.about: dict[str, Any] = json.loads(json.dumps(about))
        self._path, self._accelerator = path, accelerator
        self._must_agree = {**_MUST_AGREE, "inputs": tuple(inputs)}
        self._results: list[dict[str, Any]] = []
        self._cannot: list[dict[str, Any]] = []
        if path is not None and require_output(path).exists():
            self._results, self._cannot = self._continued(path)
        if accelerator is not None:
            # Every process has read the file before the first one writes it.
            accelerator.wait_for_everyone()

    def find(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a cell, if it is there."""
        wanted = [cell.get(name) for name in _CELL]
        return next((result for result in self._results if [result.get(name) for name in _CELL] == wanted), None)

    def add(self, result: Mapping[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        ran = {"processor": processor(self.about["machine"]), "date": now}
        self._results.append(json.loads(json.dumps({**result, **ran})))
        self._write()

    def change(self, cell: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Add to the result of a cell, or put other numbers in place of those it has."""
        result = self.find(cell)
        if result is None:
            raise ValueError(f"there is no result of {cell.get('name')!r} to be changed")
        result.update(json.loads(json.dumps(found)))
        self._write()

    def add_cannot(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Note what cannot run, each cell with its reason, beside the results."""
        self._cannot += [new for new in json.loads(json.dumps(cells)) if new not in self._cannot]
        if self._results and cells:
            self._write()

    def _write(self) -> None:
        if self._path is not None and (self._accelerator is None or self._accelerator.is_main_process):
            write_json(self._path, {**self.about, "results": self._results, "cannot": self._cannot})

    def _continued(self, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            # Results of before they said so ran on the processor of their file.
            results = [{"processor": processor(before["machine"]), **result} for result in before["results"]]
            cannot = list(before.get("cannot", []))
            differs = [
                f"{part} {name}: {before[part][name]!r} there, {self.about[part][name]!r} now"
                for part, names in self._must_agree.items()
                for name in names
                if before[part][name] != self.about[part][name]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} exists and is no evaluation of agglo's; remove it, or write to another place"
            ) from error
        if differs:
            raise ValueError(
                f"{str(path)!r} holds another evaluation ({'; '.join(differs)}); remove it, or write to another place"
            )
        return results, cannot
