"""--import: modules of one's own, for the methods that they register."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def import_modules(names: Sequence[str]) -> None:
    """Import modules by name, of the current folder or installed; ValueError names the one that cannot be."""
    here = str(Path.cwd())
    if names and here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; the command `agglo` does not
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            raise ValueError(f"--import {name}: {_reason(name, error)}") from error


def _reason(name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
        hint = f"; write it without .py: --import {name[:-3]}" if name.endswith(".py") else ""
        return f"there is no module {error.name!r}, neither in this folder nor installed{hint}"
    return f"it cannot be imported: {type(error).__name__}: {error}"
