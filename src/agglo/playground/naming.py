"""What models are called on the page, and whether two names mean the same."""

from __future__ import annotations

import re
from pathlib import Path


def without_folders(name: str) -> str:
    """A model's name for visitors, who are to see no path of the machine: the last part of it.

    >>> without_folders("hf:/home/anna/vit/"), without_folders("deit_tiny_patch16_224")
    ('vit', 'deit_tiny_patch16_224')
    """
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def same_name(one: str, other: str) -> bool:
    """Whether two names, as typed, mean the same model: a folder may be typed with a slash at its end or without."""
    return Path(one) == Path(other)
