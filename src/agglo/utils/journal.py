"""The results of a long run, in a JSON file that survives a kill and is continued by the same run only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agglo.utils.files import replacing, require_output
from agglo.utils.machine import processor

Key = Mapping[str, Any]
Result = dict[str, Any]


class Journal:
    """Results by key, in the order in which they were found.

    The file is complete after every result: the header's entries, and a list of the results. A result holds its key
    under "cell", the values of the key once more, what was found, and the processor and date.

    Args:
        path: None keeps everything in memory.
        header: What all results have in common: the "machine", fingerprints of weights and data. Further entries of an
            existing file stay.
        same: Names of header entries, dotted for nested ones, in which an existing file must agree with the header.
        subject: Names in a key that say which model and data a result belongs to.
        sources: Names in a result that must be equal in all results of one subject, where two results have them.
        entries: Name of the list of results in the file.
        writes: Whether this process writes the file, of several that run the same cells together. Let all of them
            open the journal before the first one adds to it.

    Raises:
        ValueError: The file is not a journal, or belongs to another run.
    """

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, Any],
        *,
        same: Iterable[str] = (),
        subject: Sequence[str] = (),
        sources: Sequence[str] = (),
        entries: str = "results",
        writes: bool = True,
    ) -> None:
        self.path, self._subject, self._sources = path, subject, sources
        self._entries, self._writes = entries, writes
        self.header: dict[str, Any] = plain(header)
        self._machine = self.header["machine"]
        self._results: dict[str, Result] = {}
        if path is not None and path.exists():
            before, self._results = self._read(require_output(path))
            require_same(path, before, self.header, same)
            # Until something is added, everything was found on the machine of before.
            self.header = {**before, **self.header, "machine": before.get("machine")}

    def __contains__(self, key: Key) -> bool:
        return key_of(key) in self._results

    def find(self, key: Key) -> Result | None:
        """Return the result of a key, or None if there is none yet."""
        return self._results.get(key_of(key))

    def once(self, key: Key, compute: Callable[[], Mapping[str, Any]]) -> Result:
        """Return the result of a key; compute and add it if this and earlier runs have not."""
        if key not in self:
            self.add(key, compute())
        return self._results[key_of(key)]

    def add(self, key: Key, found: Mapping[str, Any]) -> None:
        """Add a result, or replace that of the same key.

        Raises:
            ValueError: A result of the same subject has other sources.
        """
        self._require_same_sources({**key, **found})
        ran = {"processor": processor(self._machine), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        self._results[key_of(key)] = plain({**key, **found, **ran, "cell": dict(key)})
        self.write()

    def write(self) -> None:
        """Write the file in one step: header and results, each entry on a line."""
        self.header["machine"] = self._machine
        if self.path is None or not self._writes:
            return
        results = ",\n".join(map(json.dumps, self._results.values()))
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.header.items()]
        parts.append(f"{json.dumps(self._entries)}: [\n{results}\n]")
        with replacing(self.path) as unfinished:
            unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    @property
    def results(self) -> list[Result]:
        return list(self._results.values())

    @property
    def content(self) -> dict[str, Any]:
        """The header and the results, as the file holds them."""
        return {**self.header, self._entries: self.results}

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Result]]:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            return before, {key_of(result["cell"]): result for result in before.pop(self._entries)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} exists and is not a journal of agglo's; write to another place") from error

    def _require_same_sources(self, new: Mapping[str, Any]) -> None:
        for result in self._results.values():
            if any(result.get(name) != new.get(name) for name in self._subject):
                continue
            for name in self._sources:
                then, now = result.get(name), plain(new.get(name))
                if None not in (then, now) and then != now:
                    what = ", ".join(str(new[name]) for name in self._subject if new.get(name) is not None)
                    raise ValueError(
                        f"{str(self.path)!r} holds results of {what} with other {name} ({then} there, {now} now); "
                        "write to another place"
                    )


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError, which lists every difference, unless a file agrees with what it is to hold in some entries."""
    then, new, wanted = _flat(before), _flat(now), [f"{name}." for name in names]
    differing = [
        f"{name}: {then.get(name)!r:.80} there, {new.get(name)!r:.80} now"
        for name in {**then, **new}
        if then.get(name) != new.get(name) and f"{name}.".startswith(tuple(wanted))
    ]
    if differing:
        raise ValueError(f"{str(path)!r} belongs to another run ({'; '.join(differing)}); write to another place")


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value))


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested entries under one dotted name each."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def key_of(key: Key) -> str:
    """Return a text that is equal for equal keys, whatever the order of their values."""
    return json.dumps(dict(key), sort_keys=True)
