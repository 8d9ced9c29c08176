"""The folder of a run: its settings, its log, its last and best checkpoints."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agglo.utils.files import remove_unfinished, replacing, write_json
from agglo.utils.journal import require_same
from agglo.utils.machine import machine


class RunFolder:
    """The files of a run.

    They are settings.json, start.json, log.csv, last/ (state.pt, model.safetensors), best/ (model.safetensors,
    result.json), and result.json once the run is done.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.last, self.best = path, path / "last", path / "best"
        self.state = self.last / "state.pt"
        self._settings, self._start = path / "settings.json", path / "start.json"

    def require_same(self, settings: Mapping[str, Any], processes: int, may_differ: Collection[str]) -> None:
        """Raise ValueError if the folder belongs to a run with other settings than those that may differ."""
        if not self._settings.exists():
            return
        try:
            before = json.loads(self._settings.read_text(encoding="utf-8"))
            then = {**before["settings"], "processes": before["processes"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self._settings)!r} is not the settings of a run; choose another folder") from error
        now = {**settings, "processes": processes}
        require_same(self._settings, then, now, [name for name in now if name not in may_differ])

    def start(
        self,
        settings: Mapping[str, Any],
        processes: int,
        data: Path,
        skipped: Sequence[str],
        fingerprints: Mapping[str, str],
    ) -> None:
        """Make the folder and write how the run began, in one process only.

        Call it once settings and data are known to be right: a run that never began must not block the folder.

        Raises:
            ValueError: The run started from something else, which a file of the same name may hold by now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        if not self._settings.exists():
            record = {"settings": dict(settings), "processes": processes, "data": str(data), "skipped": list(skipped)}
            write_json(self._settings, {**record, "machine": machine()})
        if not self._start.exists():
            write_json(self._start, dict(fingerprints))
        require_same(self._start, self.started_from(), fingerprints, fingerprints)

    def started_from(self) -> dict[str, str]:
        """Return the fingerprints that `start` noted."""
        found: dict[str, str] = json.loads(self._start.read_text(encoding="utf-8"))
        return found

    def save_log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write all rows of the log anew: a resumed run repeats none and loses none."""
        with (
            replacing(self.path / "log.csv") as unfinished,
            unfinished.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
