"""Results of `agglo tune`, read from a file, or by the name of a ready-made one, which lie in this folder.

A file is JSON. Under "config" it holds a `ReductionConfig`, or null while the search is not finished; everything else
is about the search (docs/tune.md).
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.checks import choice
from agglo.config import ReductionConfig

FORMAT = "agglo tuned 2"
_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the ready-made results that come with agglo."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read(source: str | PathLike[str]) -> dict[str, Any]:
    """Return all that a result holds, by its file or the name of a ready-made one; ValueError if there is none."""
    if not isinstance(source, (str, PathLike)):
        raise ValueError(f"tuned={source!r} must be a file that agglo tune wrote, or the name of a ready-made result")
    path = Path(source)
    if not path.is_file():
        path = _FOLDER / f"{choice('tuned', str(source), names(), also=', or a file')}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"tuned={str(source)!r} is no result of agglo tune") from error
    if found != FORMAT:
        raise ValueError(f"tuned={str(source)!r} has format {found!r}; accepted: {FORMAT!r}")
    return content


def config(source: str | PathLike[str]) -> ReductionConfig:
    """Return the config of a result; see `read`."""
    found = read(source)["config"]
    if found is None:
        raise ValueError(f"tuned={str(source)!r} is a search that was stopped; the same call or command continues it")
    return ReductionConfig.from_dict(found)
