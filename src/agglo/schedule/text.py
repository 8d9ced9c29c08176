"""Schedules from what people type and files hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from agglo.schedule.base import Schedule, WrittenSchedule
from agglo.schedule.kinds import Constant, Counts, Geometric, Linear, PerBlock, Stages

_KINDS: dict[str, type[WrittenSchedule]] = {
    kind.form.kind: kind for kind in (Stages, Counts, Constant, Linear, Geometric, PerBlock)
}
_LISTS = ("left", "removed", "blocks")  # fields that are lists even of one number
_WHOLE = re.compile(r"[0-9]+")
EXAMPLES = ", ".join(kind.form.examples[0] for kind in _KINDS.values())


def parse_schedule(text: str) -> Schedule:
    """A schedule from its text, `kind:values@blocks:flag`; ValueError says what is accepted.

    stages:0.5, stages:0.9,0.7,0.5@3,6,9    keep rates at each stage, and the blocks of the stages (default: a quarter,
                                            a half and three quarters of the depth); flags: nested, returning
    counts:90,30,10@3,6,9                   patch tokens left after each stage; flag: returning
    constant:14, constant:14@3              patch tokens removed per block, and the first block that removes any
    linear:16                               patch tokens removed per block on average, twice that at first, none at last
    geometric:0.8, geometric:0.8@0          keep rate at each block, and the first block that reduces (default: 3)
    blocks:0,0,0,49,0,0,49                  patch tokens removed at each block

    >>> parse_schedule("stages:0.5@3,6,9"), parse_schedule("stages:0.7:nested"), parse_schedule("constant:14@3")
    (Stages(0.5, blocks=(3, 6, 9)), Stages(0.7, nested=True), Constant(14, start=3))
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in _KINDS:
        close = get_close_matches(kind, _KINDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"schedule={text!r} is not known; accepted are such as {EXAMPLES}{hint}")
    form = _KINDS[kind].form
    body, *flags = rest.split(":")
    values, at_sign, at = body.partition("@")
    try:
        if at_sign and form.at is None:
            raise ValueError(f"{kind} takes no @")
        given = {form.values: _numbers(form.values, values)}
        if at_sign and form.at is not None:
            given[form.at] = _numbers(form.at, at)
        for flag in flags:
            if flag not in form.flags:
                raise ValueError(f"{flag!r} is no flag of it, {' and '.join(form.flags) or 'none'} may follow")
            given[flag] = True
        return _KINDS[kind](**given)
    except ValueError as error:
        raise ValueError(f"schedule={text!r}: {error}; write it as {' or '.join(form.examples)}") from None


def schedule_from_dict(content: Mapping[str, Any]) -> Schedule:
    """A schedule from what its `as_dict` gave.

    >>> schedule_from_dict({"kind": "stages", "keep_rate": 0.5, "blocks": [3, 6, 9]})
    Stages(0.5, blocks=(3, 6, 9))
    """
    given = dict(content)
    kind = given.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"schedule kind={kind!r} is not known; accepted: {', '.join(map(repr, _KINDS))}")
    accepted = {field.name: field.default is MISSING for field in fields(_KINDS[kind]) if field.init}  # type: ignore[arg-type]
    wrong = [name for name in given if name not in accepted]
    missing = [name for name, needed in accepted.items() if needed and name not in given]
    if wrong or missing:
        problem = f"has no {wrong[0]!r}" if wrong else f"needs {missing[0]!r}"
        raise ValueError(f"schedule {dict(content)!r}: {kind} {problem}; it has {', '.join(accepted)}")
    return _KINDS[kind](**given)


def as_schedule(schedule: Schedule | str | Sequence[int]) -> Schedule:
    """A schedule as it is, from its text, or a list of tokens removed at each block as a PerBlock."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        return parse_schedule(schedule)
    if not isinstance(schedule, Sequence):
        accepted = f"a Schedule, its text ({EXAMPLES}) or a list of tokens removed at each block"
        raise ValueError(f"schedule={schedule!r} must be {accepted}")
    return PerBlock(schedule)  # type: ignore[arg-type]  # no text any more


def _numbers(name: str, text: str) -> Any:
    """A number, or a tuple of several; a comma at the end makes a tuple of one."""
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) > 1 and not pieces[-1]:
        pieces, is_list = pieces[:-1], True
    else:
        is_list = len(pieces) > 1 or name in _LISTS
    numbers = tuple(_number(name, piece) for piece in pieces)
    return numbers if is_list else numbers[0]


def _number(name: str, text: str) -> float:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
