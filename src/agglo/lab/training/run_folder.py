"""The folder of a run: its settings, its log, its last and best checkpoints."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from agglo.utils.files import load_state, remove_unfinished, replacing, save_state, save_weights, write_json
from agglo.utils.journal import require_same
from agglo.utils.machine import machine


class RunFolder:
    """The files of a run.

    They are settings.json, start.json, log.csv, last/ (state.pt, model.safetensors), best/ (model.safetensors,
    result.json), and result.json once the run is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.best = path / "last", path / "best"
        self._start = path / "start.json"

    def require_same(
        self, settings: Mapping[str, Any], processes: int, *, defaults: Mapping[str, Any], may_differ: Collection[str]
    ) -> None:
        """Raise ValueError if the folder belongs to a run with other settings; see `train` for the arguments."""
        path = self.path / "settings.json"
        if not path.exists():
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            then = {**defaults, **before["settings"], "processes": before["processes"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not the settings of a run; choose another output folder") from error
        now = {**settings, "processes": processes}
        require_same(path, then, now, [name for name in now if name not in may_differ])

    def start(self, settings: Mapping[str, Any], processes: int, data: Path, skipped: Sequence[str] = ()) -> None:
        """Make the folder and write its settings, in one process only.

        Call it once settings and data are known to be right: a run that never began must not block the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        record = {"settings": dict(settings), "processes": processes, "data": str(data), "skipped": list(skipped)}
        if not (self.path / "settings.json").exists():
            write_json(self.path / "settings.json", {**record, "machine": machine()})

    def require_same_start(self, fingerprints: Mapping[str, str]) -> None:
        """Raise ValueError if the run started from something else, which a file of the same name may hold by now.

        Fingerprints that the folder lacks are not compared.
        """
        if not self._start.exists():
            write_json(self._start, dict(fingerprints))
        before = self.started_from()
        require_same(self._start, before, fingerprints, [name for name in fingerprints if name in before])

    def started_from(self) -> dict[str, str]:
        """Return the fingerprints that `require_same_start` noted."""
        found: dict[str, str] = json.loads(self._start.read_text(encoding="utf-8")) if self._start.exists() else {}
        return found

    def load(self) -> dict[str, Any] | None:
        """Return the last checkpoint, or None."""
        return load_state(self.last / "state.pt")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        save_state(self.last / "state.pt", state)

    def finish(self, best: Mapping[str, Any]) -> None:
        """Write the best row of the log, which marks the run as done."""
        write_json(self.path / "result.json", dict(best))

    def save_log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write all rows of the log anew: a resumed run repeats none and loses none."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
        with replacing(self.path / "log.csv") as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8")

    def save_last(self, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        """Write the current weights, for other programs."""
        save_weights(self.last / "model.safetensors", weights, about)

    def save_best(self, weights: Mapping[str, Tensor], about: Mapping[str, str], result: Mapping[str, Any]) -> None:
        """Write the best weights so far, and their metrics."""
        save_weights(self.best / "model.safetensors", weights, about)
        write_json(self.best / "result.json", dict(result))
