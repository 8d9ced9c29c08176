"""What is searched: the options of each method, the families of schedules, and the values that are tried of each.

A value is a few arguments of `ReductionConfig.of`, or of `counts_at` for the schedule. The first value of an axis is
where the search begins. A value with a name that neither the method nor `ReductionConfig` knows is left out, and so is
one that the model refuses: the same table serves every method, every host, and methods that gain an option later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from typing import Any

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.methods.registry import find
from agglo.schedule import Counts, Schedule, Stages

Values = tuple[dict[str, Any], ...]

# The options of each method, by the name of the axis. A method that is not listed runs with its defaults.
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
    "tomesd": {"features": ({"features": "tokens"}, {"features": "keys"}, {"features": "keys_per_head"})},
}
# What every method has on models that take a schedule; some options do not go with it, so it is tried with each.
PLACE: Values = ({}, {"place": "before_block"})
# Changes no output and only saves time, and is therefore taken wherever the model allows it.
EXACT = {"last_block": "class_token"}
CURVES = ("geometric", "constant", "linear")
STRIDES = (1, 2, 3)
SCHEDULE_AXES = ("curve", "start", "last", "stride")


class NothingToReduceError(ValueError):
    """A schedule was asked for that leaves all tokens."""


def counts_at(curve: str, start: int, last: int, stride: int, amount: float, n_tokens: int) -> dict[int, int]:
    """Return the patch tokens left after each block that reduces.

    Args:
        curve: "geometric" keeps the same fraction at every reduction, "constant" removes the same number, "linear"
            removes most at the first and ever fewer, as the schedule of that name.
        start: The first block that reduces.
        last: The last block that may.
        stride: Every so many blocks reduce.
        amount: Fraction of n_tokens that is left in the end, in (0, 1].
        n_tokens: Patch tokens of an image.

    >>> counts_at("geometric", 3, 9, 3, 0.125, 196), counts_at("constant", 0, 3, 1, 0.5, 8)
    ({3: 98, 6: 49, 9: 24}, {0: 7, 1: 6, 2: 5, 3: 4})
    """
    blocks = range(start, last + 1, stride)
    if not blocks:
        raise ValueError(f"a schedule from block {start} to block {last} has no block")
    counts = {}
    for nth, block in enumerate(blocks, start=1):
        share = nth / len(blocks)
        if curve == "geometric":
            left = amount**share
        elif curve == "constant":
            left = 1 - (1 - amount) * share
        else:
            left = 1 - (1 - amount) * (1 - (1 - share) ** 2)
        counts[block] = max(1, int(n_tokens * left + 1e-9))
    return counts


def schedule_of(counts: Mapping[int, int], n_tokens: int, *, any_size: bool) -> Schedule:
    """Return the schedule that leaves such counts, without the blocks at which nothing would be removed.

    Args:
        counts: Patch tokens left after each block that reduces.
        n_tokens: Patch tokens of an image.
        any_size: Whether the schedule is one of fractions, for any number of tokens, which leave these of n_tokens.

    >>> schedule_of({3: 98, 6: 98, 9: 24}, 196, any_size=False)
    Counts((98, 24), blocks=(3, 9))
    """
    falling: dict[int, int] = {}
    left = n_tokens
    for block, count in counts.items():
        if count < left:
            falling[block] = left = count
    if not falling:
        raise NothingToReduceError(f"a schedule that leaves all of {n_tokens} tokens reduces nothing")
    blocks = tuple(falling)
    if not any_size:
        return Counts(tuple(falling.values()), blocks=blocks)
    rates = (after / before for before, after in pairwise([n_tokens, *falling.values()]))
    return Stages(tuple(rates), blocks=blocks)


@dataclass(frozen=True)
class Axis:
    """A dimension of the space: the values that are tried of it, and the index of the first one that is."""

    name: str
    values: Values
    first: int = 0


Candidate = tuple[int, ...]  # a way to reduce a model, except for how far: the index of the value of each axis


@dataclass(frozen=True)
class Space:
    """Everything that is tried of one method.

    All candidates have the values of `always`; `left_out` holds what the model refuses, each with the reason.
    """

    method: str
    axes: Sequence[Axis]
    always: Mapping[str, Any]
    left_out: Sequence[str] = ()

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return prod(len(axis.values) for axis in self.axes)

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """Return the values of a candidate: arguments of `ReductionConfig.of` and of `counts_at`."""
        found = {"method": self.method, **self.always}
        for axis, pick in zip(self.axes, candidate, strict=True):
            found.update(axis.values[pick])
        return found

    def first(self) -> Candidate:
        """Return the candidate where the search begins."""
        return tuple(axis.first for axis in self.axes)

    def around(self, candidate: Candidate) -> list[Candidate]:
        """Return all candidates that differ from one in a single axis."""
        return [
            (*candidate[:index], pick, *candidate[index + 1 :])
            for index, axis in enumerate(self.axes)
            for pick in range(len(axis.values))
            if pick != candidate[index]
        ]

    def sample(self, chance: random.Random) -> Candidate:
        """Draw a candidate."""
        return tuple(chance.randrange(len(axis.values)) for axis in self.axes)


def space_of(method: str, *, depth: int | None, tries: Callable[[ReductionConfig], None]) -> Space:
    """Return the space of a method on one model.

    Args:
        method: Its name.
        depth: Blocks that a schedule may reduce at; None for diffusion models, which take one keep rate.
        tries: Raises ValueError where the model refuses a config.
    """
    accepted = {*find(method).defaults(), *(each.name for each in fields(ReductionConfig))}
    little = {"keep_rate": 0.9} if depth is None else {"keep_rate": 0.9, "blocks": [max(1, depth // 2)]}
    left_out: list[str] = []
    always: dict[str, Any] = {}

    def fits(value: Mapping[str, Any]) -> bool:
        if not accepted.issuperset(value):
            return False
        try:
            tries(ReductionConfig.of(method, **{**always, **value, **little}))
            return True
        except (ValueError, UnsupportedModelError) as error:
            written = ", ".join(f"{name}={given!r}" for name, given in value.items())
            left_out.append(f"{method}, {written or 'its defaults'}: {error}")
            return False

    if depth is not None and fits(EXACT):
        always.update(EXACT)
    axes = [Axis(name, tuple(filter(fits, values))) for name, values in OPTIONS.get(method, {}).items()]
    if depth is not None:
        axes += [Axis("place", PLACE), *_schedule_axes(depth)]
    return Space(method, [axis for axis in axes if axis.values], always, left_out)


def _schedule_axes(depth: int) -> list[Axis]:
    """Return the axes of the schedule, which begin at a quarter of the depth, where the paper does."""
    starts = range(max(1, 3 * depth // 4))
    lasts = [depth - 1, depth - 2, *range(depth - 3, depth // 2 - 1, -2)]
    return [
        Axis("start", tuple({"start": start} for start in starts), first=depth // 4),
        Axis("last", tuple({"last": last} for last in dict.fromkeys(lasts) if last >= 0)),
        Axis("curve", tuple({"curve": curve} for curve in CURVES)),
        Axis("stride", tuple({"stride": stride} for stride in STRIDES if stride < max(2, depth))),
    ]
