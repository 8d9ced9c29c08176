"""What is searched: the options of each method, the families of schedules, and the values that are tried of each.

A value is a few arguments of `ReductionConfig.of`, or the shape of a schedule. The first value of an axis is where the
search begins; all of them together are the recipe of `budget`. A value with a name that neither the method nor
`ReductionConfig` knows is left out, and so is one that the model refuses: the same table serves every method, every
host, and methods that gain an option later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agglo.budget import schedule_of
from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.methods.registry import find

Values = tuple[Mapping[str, Any], ...]
Candidate = tuple[int, ...]  # a config except for its budget: the index of the value of each axis

# The options of each method, by the name of the axis. A method that is not listed runs with its defaults.
OPTIONS: Mapping[str, Mapping[str, Values]] = {
    "atc": {
        "features": ({"features": "tokens"}, {"features": "keys"}, {"features": "keys_per_head"}),
        "linkage": ({"linkage": "complete"}, {"linkage": "average"}),
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
SCHEDULE_AXES = ("curve", "start", "last", "stride")
_DIGITS = 4  # of a keep rate


@dataclass(frozen=True)
class Space:
    """What is tried of one method, and what all candidates have."""

    method: str
    axes: Mapping[str, Values]
    always: Mapping[str, Any]

    @property
    def first(self) -> Candidate:
        """The candidate where the search begins."""
        return (0,) * len(self.axes)

    def propose(self, draws: int, seed: int) -> list[Candidate]:
        """Return different candidates: the first, all that differ from it in one axis, and others at random."""
        sizes, first, chance = [len(values) for values in self.axes.values()], self.first, random.Random(seed)
        around = [(*first[:axis], pick, *first[axis + 1 :]) for axis, n in enumerate(sizes) for pick in range(1, n)]
        drawn = [tuple(map(chance.randrange, sizes)) for _ in range(draws)]
        return list(dict.fromkeys([first, *around, *drawn]))

    def config(self, candidate: Candidate, amount: float) -> ReductionConfig:
        """Return the config of a candidate that leaves a fraction of tokens in the end; see `schedule_of`."""
        values = {"method": self.method, **self.always}  # arguments of `ReductionConfig.of` and of `schedule_of`
        for axis, pick in zip(self.axes.values(), candidate, strict=True):
            values |= axis[pick]
        shape = {name: values.pop(name) for name in SCHEDULE_AXES if name in values}
        budget = {"schedule": schedule_of(**shape, amount=amount)} if shape else {"keep_rate": round(amount, _DIGITS)}
        return ReductionConfig.of(**values, **budget)


def space_of(method: str, *, depth: int | None, tries: Callable[[ReductionConfig], None]) -> Space:
    """Return the space of a method on a model of some depth, or None for a diffusion model, which takes a keep rate.

    `tries` raises a ValueError where the model refuses a config.
    """
    accepted = {*find(method).defaults(), *(each.name for each in fields(ReductionConfig))}
    little = {"keep_rate": 0.9} if depth is None else {"keep_rate": 0.9, "blocks": [max(1, depth // 2)]}
    always: dict[str, Any] = {}

    def fits(value: Mapping[str, Any]) -> bool:
        if not accepted.issuperset(value):
            return False
        try:
            tries(ReductionConfig.of(method, **{**always, **value, **little}))
        except (ValueError, UnsupportedModelError):
            return False
        return True

    if depth is not None and fits(EXACT):
        always.update(EXACT)
    axes = {name: tuple(filter(fits, values)) for name, values in OPTIONS.get(method, {}).items()}
    if depth is not None:
        # The search begins with the recipe's schedule (`budget.recipe_schedule`).
        schedules: dict[str, Sequence[Any]] = {
            "start": sorted(range(max(1, 3 * depth // 4)), key=lambda start: abs(start - depth // 4)),
            "last": list(dict.fromkeys([3 * depth // 4, depth - 1, depth - 2, *range(depth - 3, depth // 2 - 1, -2)])),
            "curve": ("geometric", "constant", "linear"),
            "stride": [stride for stride in (1, 2, 3) if stride < depth],
        }
        axes |= {"place": PLACE, **{name: tuple({name: each} for each in tried) for name, tried in schedules.items()}}
    return Space(method, {name: values for name, values in axes.items() if values}, always)
