"""Checks of options: each returns the value, or raises a ValueError that names the option and what is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)
_LISTED = 40  # of the accepted values, in a message


def choice(name: str, value: object, accepted: Iterable[T], *, also: str = "") -> T:
    """Return the accepted value that equals the given one and is of its type: 1 is not True.

    Args:
        name: The option, as users write it.
        value: What was given.
        accepted: The values to choose from, such as the keys of a table.
        also: What else is accepted, to end the message with: ", or a list of them".

    >>> choice("linkage", "singel", ("single", "average"))
    Traceback (most recent call last):
    ValueError: linkage='singel' is not known; did you mean 'single'? accepted: 'single', 'average'
    """
    known = list(accepted)
    for each in known:
        if isinstance(value, type(each)) and isinstance(value, bool) == isinstance(each, bool) and value == each:
            return each
    names = [each for each in known if isinstance(each, str)]
    close = get_close_matches(value, names) if isinstance(value, str) else []
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    listed = ", ".join(map(repr, known[:_LISTED])) + (" and more" if len(known) > _LISTED else "")
    raise ValueError(f"{name}={value!r} is not known; {hint}accepted: {listed}{also}")


def flag(name: str, value: object) -> bool:
    """Return True or False; "off", 0 and None are neither."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def number(
    name: str,
    value: N,
    *,
    whole: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> N:
    """Return a number within bounds, which is an int if `whole`. NaN, a bool and a text are none; NumPy's are.

    >>> number("momentum", 2.0, above=0, maximum=1)
    Traceback (most recent call last):
    ValueError: momentum=2.0 must be a number above 0 and at most 1
    """
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    fits = fits and value == value  # NaN is not equal to itself
    fits = fits and (minimum is None or value >= minimum) and (above is None or value > above)
    if not fits or (maximum is not None and value > maximum):
        limits = {"above": above, "at least": minimum, "at most": maximum}
        within = " and ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)
        raise ValueError(f"{name}={value!r} must be a {'whole ' * whole}number{within and f' {within}'}")
    if isinstance(value, (int, float)):
        return value
    plain: Any = int(value) if isinstance(value, Integral) else float(value)
    return plain


def whole_numbers(name: str, values: Any, *, minimum: int = 0, length: int | None = None) -> tuple[int, ...]:
    """Return a list of whole numbers as a tuple, of a length if one is given, and never empty."""
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if not is_list or not values or length not in (None, len(values)):
        many = "" if length is None else f"{length} "
        raise ValueError(f"{name}={values!r} must be a list of {many}whole numbers, each at least {minimum}")
    return tuple(number(name, each, whole=True, minimum=minimum) for each in values)
