"""The folder of a run: its settings, its log, its last and best checkpoints."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from agglo.experiments.files import load_state, remove_unfinished, replacing, save_state, save_weights, write_json
from agglo.experiments.machine import machine


class RunFolder:
    """settings.json, log.csv, last/ (state.pt, model.safetensors), best/ (model.safetensors, result.json), and
    result.json once the run is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.best = path / "last", path / "best"
        self._start = path / "start.json"

    def require_same(
        self, settings: Mapping[str, Any], processes: int, *, defaults: Mapping[str, Any], may_differ: Collection[str]
    ) -> None:
        """Raise if the folder belongs to a run that was started otherwise.

        defaults: what a setting is that did not exist yet when the run began.
        may_differ: settings that decide nothing about the result.
        """
        record = self.path / "settings.json"
        if not record.exists():
            return
        now = {**settings, "processes": processes}
        try:
            before = json.loads(record.read_text(encoding="utf-8"))
            then = {**defaults, **before["settings"], "processes": before["processes"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(record)!r} is no record of a run; give another folder, or remove it") from error
        differing = [name for name in now if name not in may_differ and now[name] != then[name]]
        if differing:
            differences = ", ".join(f"{name}={then[name]!r} then and {now[name]!r} now" for name in differing)
            raise ValueError(
                f"output={str(self.path)!r} holds another run: {differences}; give another folder, or remove it"
            )

    def start(self, settings: Mapping[str, Any], processes: int, data: Path, skipped: Sequence[str] = ()) -> None:
        """Make the folder ready. Only one process does this, once all that could be wrong with settings and data has
        been tried: what never began must not stand in the way of what is put right.

        skipped: images that are left out, in words.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        record = {"settings": dict(settings), "processes": processes, "data": str(data), "skipped": list(skipped)}
        if not (self.path / "settings.json").exists():
            write_json(self.path / "settings.json", {**record, "machine": machine()})

    def require_same_start(self, fingerprints: Mapping[str, str]) -> None:
        """Raise if the run started from something else, which a file or folder of the same name may hold by now.

        fingerprints: of "weights" and "training images", say.
        """
        if not self._start.exists():
            write_json(self._start, dict(fingerprints))
        before = self.started_from()
        for what, now in fingerprints.items():
            if (then := before.get(what, now)) != now:
                raise ValueError(
                    f"output={str(self.path)!r} holds a run that started from other {what} "
                    f"({then} then, {now} now); give another folder, or remove it"
                )

    def started_from(self) -> dict[str, str]:
        """The fingerprints that `require_same_start` noted; none for a run of before it did."""
        found: dict[str, str] = json.loads(self._start.read_text(encoding="utf-8")) if self._start.exists() else {}
        return found

    def load(self) -> dict[str, Any] | None:
        """Where the run stands, if it started before."""
        return load_state(self.last / "state.pt")

    def save(self, state: Mapping[str, Any]) -> None:
        """Where the run stands now."""
        save_state(self.last / "state.pt", state)

    def finish(self, best: Mapping[str, Any]) -> None:
        """Say that the run is done, and its best row of the log."""
        write_json(self.path / "result.json", dict(best))

    def save_log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """All rows again: a run that goes on repeats none and loses none."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
        with replacing(self.path / "log.csv") as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8")

    def save_last(self, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        """The weights as they are, for other programs."""
        save_weights(self.last / "model.safetensors", weights, about)

    def save_best(self, weights: Mapping[str, Tensor], about: Mapping[str, str], result: Mapping[str, Any]) -> None:
        """The best weights so far, and how good they are."""
        save_weights(self.best / "model.safetensors", weights, about)
        write_json(self.best / "result.json", dict(result))
