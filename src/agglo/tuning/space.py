"""What is searched: every option with the values that are tried, in one place.

A value is a few keyword arguments of `agglo.apply`. The first value of an axis is where the search begins. A value with
a name that neither the method nor `apply` knows is left out, and so is one that the model refuses: the same table
serves every method, every host, and methods that gain an option later.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agglo.hosts.diffusion import apply as apply_to_diffusion
from agglo.hosts.swap import UnsupportedModelError
from agglo.methods.registry import find
from agglo.patching import apply

Values = tuple[dict[str, Any], ...]

# Of each method, by what a person would call the axis. A method that is not listed runs with its defaults.
OPTIONS: Mapping[str, Mapping[str, Values]] = {
    "atc": {
        "features": ({"features": "tokens"}, {"features": "keys"}, {"features": "keys_per_head"}),
        "linkage": ({"linkage": "average"}, {"linkage": "complete"}),
        "importance": (
            {"importance": "class", "exponent": 0.5},
            {"importance": "received", "exponent": 0.5},
            {"importance": "class", "exponent": 0.25},
            {"importance": "received", "exponent": 0.25},
            {"importance": "class", "exponent": 1.0},
            {},
        ),
        "mean": ({"mean": "preserve_norm"}, {}),
    },
    "tome": {"features": ({"features": "keys"}, {"features": "keys_per_head"}, {"features": "tokens"})},
}
# Of `agglo.apply`, for every method.
PLACES: Mapping[str, Values] = {"acts": ({}, {"acts": "before block"})}
# What changes no output and only saves time is taken wherever the model allows it.
EXACT: Values = ({"unread": "drop"},)
# Of the schedule (`schedules.py`).
CURVES = ("geometric", "constant", "linear")
STRIDES = (1, 2, 3)


@dataclass(frozen=True)
class Axis:
    """first: the value where the search begins. ordered: whether neighbours are alike, so that small steps are."""

    name: str
    values: Values
    first: int = 0
    ordered: bool = False


@dataclass(frozen=True)
class Candidate:
    """One way to reduce a model, except for how far: picks are the numbers of the values of each axis of its space."""

    method: str
    picks: tuple[int, ...]


class Space:
    """Everything that is tried of one method.

    always: keyword arguments that all candidates have.
    left_out: values that this model refuses, each with the reason.
    """

    def __init__(
        self, method: str, axes: Sequence[Axis], always: Mapping[str, Any], left_out: Sequence[str] = ()
    ) -> None:
        self.method, self.axes, self.always, self.left_out = method, tuple(axes), dict(always), list(left_out)

    @property
    def size(self) -> int:
        total = 1
        for axis in self.axes:
            total *= len(axis.values)
        return total

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """All that a candidate says: arguments of `apply`, and start, last, curve and stride of its schedule."""
        found = {"method": self.method, **self.always}
        for axis, pick in zip(self.axes, candidate.picks, strict=True):
            found.update(axis.values[pick])
        return found

    def first(self) -> Candidate:
        """Where the search begins."""
        return Candidate(self.method, tuple(axis.first for axis in self.axes))

    def around(self, candidate: Candidate) -> list[Candidate]:
        """All candidates that differ from one in a single axis."""
        return [
            self._with(candidate, number, pick)
            for number, axis in enumerate(self.axes)
            for pick in range(len(axis.values))
            if pick != candidate.picks[number]
        ]

    def sample(self, chance: random.Random) -> Candidate:
        return Candidate(self.method, tuple(chance.randrange(len(axis.values)) for axis in self.axes))

    def mutant(self, candidate: Candidate, chance: random.Random) -> Candidate:
        """Another value in one axis, a neighbouring one where they are in order; sometimes in two axes."""
        movable = [number for number, axis in enumerate(self.axes) if len(axis.values) > 1]
        if not movable:
            return candidate
        changed = candidate
        for number in chance.sample(movable, min(len(movable), chance.choice((1, 1, 2)))):
            pick, count = candidate.picks[number], len(self.axes[number].values)
            if self.axes[number].ordered:
                near = [other for other in (pick - 1, pick + 1) if 0 <= other < count]
                changed = self._with(changed, number, chance.choice(near))
            else:
                changed = self._with(changed, number, chance.choice([n for n in range(count) if n != pick]))
        return changed

    def _with(self, candidate: Candidate, number: int, pick: int) -> Candidate:
        picks = list(candidate.picks)
        picks[number] = pick
        return Candidate(self.method, tuple(picks))


def space_of(method: str, *, depth: int | None, diffusion: bool, tries: Callable[[dict[str, Any]], None]) -> Space:
    """The space of a method on one model.

    depth: blocks that a schedule may reduce at; None where a model takes one keep rate.
    tries: raises ValueError where the model refuses such keyword arguments (of the method and `apply`, no schedule).
    """
    accepted = {*find(method).defaults(), *_named(apply_to_diffusion if diffusion else apply)}
    left_out: list[str] = []
    axes: list[Axis] = []
    always = {"method": method}

    def fits(value: Mapping[str, Any], *beside: Mapping[str, Any]) -> bool:
        """Whether the model takes a value beside one of these at least."""
        if not accepted.issuperset(value):
            return False
        reason: Exception | None = None
        for others in beside or ({},):
            try:
                tries({**always, **others, **value})
                return True
            except (ValueError, UnsupportedModelError) as error:
                reason = reason or error
        written = ", ".join(f"{name}={given!r}" for name, given in value.items())
        left_out.append(f"{method}, {written or 'its defaults'}: {reason}")
        return False

    for value in EXACT:
        if fits(value):
            always.update(value)
    for name, values in OPTIONS.get(method, {}).items():
        axes.append(Axis(name, tuple(value for value in values if fits(value))))
    # Where a method acts goes with some of its options and not with others.
    options = [value for axis in axes for value in axis.values]
    for name, values in PLACES.items():
        axes.append(Axis(name, tuple(value for value in values if fits(value, {}, *options))))
    axes = [axis for axis in axes if axis.values]
    del always["method"]
    if depth is not None:
        axes += _schedule_axes(depth)
    return Space(method, axes, always, left_out)


def _schedule_axes(depth: int) -> list[Axis]:
    """A quarter of the depth is where the paper begins, and the end of it is where nothing is left to save."""
    starts = range(max(1, 3 * depth // 4))
    lasts = [depth - 1, depth - 2, *range(depth - 3, depth // 2 - 1, -2)]
    return [
        Axis("start", tuple({"start": start} for start in starts), first=depth // 4, ordered=True),
        Axis("last", tuple({"last": last} for last in dict.fromkeys(lasts) if last >= 0), ordered=True),
        Axis("curve", tuple({"curve": curve} for curve in CURVES)),
        Axis("stride", tuple({"stride": stride} for stride in STRIDES if stride < max(2, depth)), ordered=True),
    ]


def _named(function: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds}
