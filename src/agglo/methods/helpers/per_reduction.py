"""Options that may differ from reduction to reduction: one value for all of them, or a list with an entry for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from agglo.methods.base import Method, ModelShape

T = TypeVar("T", bound=str | None)

OPTIONS = ("linkage", "features", "importance")


def one_or_each(name: str, given: T | Sequence[T], accepted: Sequence[T]) -> T | list[T]:
    """What was given, sequences as lists, which is what JSON makes of them; ValueError for what is not accepted.

    Where None is accepted, so is the text "none" for it: TOML has no other word.
    """
    known = ", ".join(map(repr, accepted))
    if None in accepted:
        given = _without_word(given)
    if not isinstance(given, (list, tuple)):
        if given not in accepted:
            raise ValueError(f"{name}={given!r} is not known; accepted: {known}, or a list of them, one per reduction")
        return given  # type: ignore[return-value]  # a string is a sequence too
    if not given:
        raise ValueError(f"{name}={given!r} is empty; accepted: {known}, or a list of them, one per reduction")
    for entry in given:
        if entry not in accepted:
            raise ValueError(f"{entry!r} in {name}={given!r} is not known; accepted: {known}")
    return list(given)


def entries(given: T | list[T]) -> list[T]:
    """Every value that an option has at some reduction."""
    return given if isinstance(given, list) else [given]


def at_reduction(name: str, given: T | list[T], stage: int) -> T:
    """The value of an option at a reduction before which so many came."""
    if not isinstance(given, list):
        return given
    if stage >= len(given):  # images of another size than the model's own may be reduced more often
        raise ValueError(f"{name}={given!r} has no entry for reduction {stage + 1} of this image")
    return given[stage]


def lists_of(method: Method) -> dict[str, list[Any]]:
    """The options of a method that have an entry for each reduction, by name."""
    return {name: getattr(method, name) for name in OPTIONS if isinstance(getattr(method, name, None), list)}


def require_one_per_reduction(method: Method, shape: ModelShape) -> None:
    """ValueError if an option is a list of another length than the model has reductions."""
    for name, given in lists_of(method).items():
        if len(given) != len(shape.blocks):
            blocks = ", ".join(map(str, shape.blocks)) or "none"
            raise ValueError(
                f"{name}={given!r} of {method.name} has {len(given)} entries; needed: {len(shape.blocks)}, one for "
                f"each block that reduces ({blocks})"
            )


def _without_word(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [None if entry == "none" else entry for entry in given]
    return None if given == "none" else given
