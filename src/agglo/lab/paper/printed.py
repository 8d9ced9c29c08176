"""The numbers that the paper prints, from printed.json beside this file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("printed.json")
# Images that a printed accuracy was measured on, for its own sampling error; mAP has none that is known.
IMAGES = {"imagenet": 50_000, "nabirds": 24_633}


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def table(name: str) -> dict[str, Any]:
    """table, metric, keys and values of one table: values are dicts in dicts, in the order of keys."""
    tables: dict[str, dict[str, Any]] = _content()["tables"]
    if name not in tables:
        raise ValueError(f"table={name!r} is not printed; accepted: {', '.join(tables)}")
    return tables[name]


def value(name: str, *keys: str | float) -> Any:
    """One entry of a table; None where the paper has a dash or no such row.

    >>> value("fine-tuned", "deit_tiny_patch16_224", "imagenet", "tome", 0.5)
    69.72
    >>> value("fine-tuned", "deit_tiny_patch16_224", "imagenet", "tome", 0.25) is None
    True
    """
    found: Any = table(name)["values"]
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key if isinstance(key, str) else str(float(key)))
    return found


def statement(name: str) -> Any:
    """What the paper says that follows from its own numbers: values by method or by keep rate."""
    statements: dict[str, dict[str, Any]] = _content()["statements"]
    return statements[name]["values"]


def method_names() -> dict[str, str]:
    """The paper's names of its methods, by agglo's."""
    names: dict[str, str] = _content()["methods"]
    return names
