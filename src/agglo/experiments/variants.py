"""The reductions a person asks for side by side: every method with every linkage, however far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from agglo import patching
from agglo.methods import Method, create
from agglo.schedule import REMOVING, Constant, Linear, Stages


@dataclass(frozen=True)
class Variant:
    """One way to reduce a model. One of keep_rate, threshold and schedule is given.

    name: the method and what distinguishes it, as a person would type it.
    """

    name: str
    method: Method
    keep_rate: float | None = None
    threshold: float | None = None
    schedule: Constant | Linear | None = None
    blocks: tuple[int, ...] | None = None
    proportional: bool | None = None

    @property
    def how_far(self) -> dict[str, Any]:
        """How far it reduces: keep_rate, threshold, and schedule by its name with the tokens removed a block."""
        name = None if self.schedule is None else type(self.schedule).__name__.lower()
        removed = None if self.schedule is None else self.schedule.t
        return {"keep_rate": self.keep_rate, "threshold": self.threshold, "schedule": name, "removed": removed}

    @property
    def setting(self) -> str:
        """How far it reduces, in words."""
        return in_words(self.how_far)

    def apply(self, model: nn.Module) -> None:
        """Reduce a model this way, in place of any other."""
        patching.apply(
            model,
            self.method,
            keep_rate=self.keep_rate,
            threshold=self.threshold,
            schedule=self.schedule,
            blocks=self.blocks,
            proportional=self.proportional,
        )


def in_words(how_far: Mapping[str, Any]) -> str:
    """What `Variant.how_far` says, short.

    >>> in_words({"keep_rate": 0.5}), in_words({"schedule": "linear", "removed": 16}), in_words({"threshold": 0.1})
    ('keep 0.5', 'linear 16', 'threshold 0.1')
    """
    if how_far.get("keep_rate") is not None:
        return f"keep {how_far['keep_rate']:g}"
    if how_far.get("schedule") is not None:
        return f"{how_far['schedule']} {how_far['removed']}"
    return f"threshold {how_far['threshold']:g}"


def cross(
    names: Sequence[str],
    *,
    keep_rates: Sequence[float] = (),
    thresholds: Sequence[float] = (),
    removed: Sequence[int] = (),
    schedules: Sequence[str] = ("constant",),
    linkages: Sequence[str] | None = None,
    features: str | None = None,
    blocks: Sequence[int] | None = None,
    proportional: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Variant]:
    """Every combination, repeated values once; ValueError for unknown values and for options no method takes.

    removed: tokens removed a block, by each of the schedules (of `schedule.REMOVING`).
    linkages: for the methods that have one; None is their default.
    options: further ones, by name, for the methods that have them.
    """
    for rate in keep_rates:
        Stages(rate, blocks)  # raises for what is no rate, before a model is built
    for name in schedules:
        if name not in REMOVING:
            raise ValueError(f"schedule={name!r} is not known; accepted: {', '.join(map(repr, REMOVING))}")
    if removed and blocks is not None:
        raise ValueError(f"blocks={tuple(blocks)}: a {' or '.join(schedules)} schedule reduces at every block")
    given = {**(options or {}), **({} if features is None else {"features": features})}
    chosen = [method for name in dict.fromkeys(names) for method in _instances(name, linkages, given)]
    for option, value in {"linkage": linkages, **given}.items():
        if value is not None and not any(option in method.options() for _, method in chosen):
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, names))}")
    how_far: list[dict[str, Any]] = [{"keep_rate": rate} for rate in dict.fromkeys(keep_rates)]
    how_far += [{"threshold": threshold} for threshold in dict.fromkeys(thresholds)]
    how_far += [{"schedule": REMOVING[s](t)} for s in dict.fromkeys(schedules) for t in dict.fromkeys(removed)]
    where = None if blocks is None else tuple(blocks)
    return [Variant(n, m, **far, blocks=where, proportional=proportional) for far in how_far for n, m in chosen]


def _instances(name: str, linkages: Sequence[str] | None, given: Mapping[str, Any]) -> list[tuple[str, Method]]:
    accepted = create(name).options()
    options = {option: value for option, value in given.items() if option in accepted}
    if "linkage" not in accepted:
        return [(name, create(name, **options))]
    each = dict.fromkeys(linkages or [accepted["linkage"]])
    return [(f"{name} {linkage}", create(name, linkage=linkage, **options)) for linkage in each]
