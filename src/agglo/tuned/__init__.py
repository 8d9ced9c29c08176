"""What `agglo tune` found, read back: from a file, or by the name of one that lies in this folder.

A file is JSON. Under "apply" it holds the keyword arguments of `agglo.apply`, or null while the search goes on;
everything else is about the search (docs/tune.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

FORMAT = "agglo tuned 1"
_FOLDER = Path(__file__).parent

Source = str | PathLike[str] | Mapping[str, Any]


def names() -> list[str]:
    """The ready-made results that come with agglo."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read(source: str | PathLike[str]) -> dict[str, Any]:
    """All that a file holds: source is its path, or the name of a ready-made one; ValueError if it is no such file."""
    path = _found(source)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        of_ours = content["format"] == FORMAT
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"tuned={str(source)!r} is no result of agglo tune") from error
    if not of_ours:
        raise ValueError(f"tuned={str(source)!r} has format {content['format']!r}; accepted: {FORMAT!r}")
    return dict(content)


def arguments(source: Source) -> dict[str, Any]:
    """The keyword arguments of `agglo.apply` in a result, a file or a ready-made one."""
    if isinstance(source, Mapping):
        return dict(source)
    found = read(source)["apply"]
    if found is None:
        raise ValueError(f"tuned={str(source)!r} is a search that was stopped: type the same command again to go on")
    return dict(found)


def _found(source: str | PathLike[str]) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    ready = names()
    if str(source) in ready:
        return _FOLDER / f"{source}.json"
    close = " or ".join(map(repr, get_close_matches(str(source), ready)))
    hint = f"; did you mean {close}?" if close else ""
    listed = ", ".join(map(repr, ready)) or "none so far"
    raise ValueError(f"tuned={str(source)!r} is neither a file nor a ready-made result ({listed}){hint}")
