"""Everything a search has found so far, in a file that survives a crash: the same search goes on where it was.

Whatever takes time is asked for by `once`. What the file holds is answered from it, so that a search that goes on takes
the same way as before, up to where it was stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agglo.experiments.files import replacing, require_output, write_json
from agglo.tuned import FORMAT, read

_MUST_AGREE = ("target", "model", "data", "settings")


class Record:
    """about: what the search is of; an existing file must agree with it in target, model, data and settings.

    path: None keeps everything in memory.
    """

    def __init__(self, about: Mapping[str, Any], path: Path | None) -> None:
        self.content: dict[str, Any] = {"format": FORMAT, "apply": None, **_plain(about), "steps": [], "seconds": 0.0}
        self._path = path
        self._began = time.monotonic()
        self._before = 0.0
        if path is not None and require_output(path).exists():
            self._go_on(path)
        self._known = {(step["kind"], _text(step["key"])): step["found"] for step in self.content["steps"]}

    def once(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """What compute gives, as JSON has it; it is asked for once per kind and key, in all runs together."""
        if not self.knows(kind, key):
            self.note(kind, key, compute())
            self._write()
        return self._known[kind, _text(key)]

    def note(self, kind: str, key: Any, found: Any) -> None:
        """Keep what cost nothing to find out; it is in the file from the next `once` on."""
        if not self.knows(kind, key):
            self._known[kind, _text(key)] = _plain(found)
            self.content["steps"].append({"kind": kind, "key": _plain(key), "found": _plain(found)})

    def knows(self, kind: str, key: Any) -> bool:
        """Whether `once` would answer without computing."""
        return (kind, _text(key)) in self._known

    @property
    def seconds(self) -> float:
        """That the search took so far, earlier runs included."""
        return self._before + time.monotonic() - self._began

    def finish(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The whole content, with what was found in the end."""
        self.content.update(_plain(found))
        self.content["seconds"] = round(self.seconds, 2)
        if self._path is not None:
            write_json(self._path, self.content)
        return self.content

    def _write(self) -> None:
        self.content["seconds"] = round(self.seconds, 2)
        if self._path is not None:
            # Without line breaks, which would take longer to write than many an evaluation takes to run.
            with replacing(self._path) as unfinished:
                unfinished.write_text(json.dumps(self.content), encoding="utf-8")

    def _go_on(self, path: Path) -> None:
        try:
            before = read(path)
        except ValueError as error:
            raise ValueError(f"{error}; remove it, or write to another place") from error
        differs = [
            f"{part}: {before[part]} there, {self.content[part]} now"
            for part in _MUST_AGREE
            if before[part] != self.content[part]
        ]
        if differs:
            raise ValueError(
                f"{str(path)!r} holds another search ({'; '.join(differs)}); remove it, or write to another place"
            )
        self.content["steps"] = before["steps"]
        self._before = before["seconds"]


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))
