"""The numbers that the paper prints, from printed.json in this folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from agglo.checks import choice

# Images that a printed accuracy was measured on, for its own sampling error; mAP has none that is known.
IMAGES = {"imagenet": 50_000, "nabirds": 24_633}


@cache
def content() -> dict[str, Any]:
    """Return `tables`, `statements` that the paper makes of them, and `methods`, its own names by agglo's."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name("printed.json").read_text(encoding="utf-8"))
    return read


def table(name: str) -> dict[str, Any]:
    """Return table, metric, keys and values of one table: values are dicts in dicts, in the order of keys."""
    tables: dict[str, dict[str, Any]] = content()["tables"]
    return tables[choice("table", name, tables)]


def value(name: str, *keys: str | float) -> Any:
    """Return one entry of a table; None where the paper has a dash or no such row.

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
    """Return what the paper says that follows from its own numbers: values by method or by keep rate."""
    return content()["statements"][name]["values"]
