"""Options that may be one value, or a list with an entry for each reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from agglo.checks import choice
from agglo.methods.base import Method, ModelShape

T = TypeVar("T", bound=str | None)

OPTIONS = ("linkage", "features", "importance")


def one_or_each(name: str, given: T | Sequence[T], accepted: Sequence[T]) -> T | list[T]:
    """Return what was given, sequences as lists, as JSON has them; ValueError for what is not accepted.

    Where None is accepted, so is the text "none": TOML has no other word.
    """
    if None in accepted and isinstance(given, (list, tuple)):
        given = [None if entry == "none" else entry for entry in given]  # type: ignore[misc]
    elif None in accepted and given == "none":
        given = None  # type: ignore[assignment]
    if isinstance(given, (list, tuple)) and given:
        return [choice(name, entry, accepted) for entry in given]
    return choice(name, given, accepted, also=", or a list of them, one per reduction")


def entries(given: T | list[T]) -> list[T]:
    """Return every value that an option has at some reduction."""
    return given if isinstance(given, list) else [given]


def at_reduction(name: str, given: T | list[T], stage: int) -> T:
    """Return the value of an option at a reduction, counted from 0."""
    if not isinstance(given, list):
        return given
    if stage >= len(given):  # images of another size than the model's own may be reduced more often
        raise ValueError(f"{name}={given!r} has no entry for reduction {stage + 1} of this image")
    return given[stage]


def lists_of(method: Method) -> dict[str, list[Any]]:
    """Return the options of a method that have an entry for each reduction, by name."""
    return {name: getattr(method, name) for name in OPTIONS if isinstance(getattr(method, name, None), list)}


def require_one_per_reduction(method: Method, shape: ModelShape) -> None:
    """Raise ValueError if an option is a list of another length than the model has reductions."""
    for name, given in lists_of(method).items():
        if len(given) != len(shape.blocks):
            blocks = ", ".join(map(str, shape.blocks)) or "none"
            raise ValueError(
                f"{name}={given!r} of {method.name} has {len(given)} entries; needed: {len(shape.blocks)}, one for "
                f"each block that reduces ({blocks})"
            )
