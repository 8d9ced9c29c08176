"""The reductions a person asks for side by side: every method with every linkage at every budget.

A budget says how many tokens stay: a keep rate, a threshold or a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from agglo import patching, tuned
from agglo.methods import Method, create, method_text, option_text, option_value, parse_method, split_method_text
from agglo.methods.base import Place
from agglo.schedule import Schedule, Stages, as_schedule

# Of the arguments of `agglo.apply`, those that are neither the method nor its options nor the schedule.
_HOW = ("keep_rate", "threshold", "blocks", "proportional", "acts", "unread")


@dataclass(frozen=True)
class Variant:
    """One way to reduce a model. One of keep_rate, threshold and schedule is given.

    name: the method and what distinguishes it, as a person would type it.
    proportional, acts, unread: as in `agglo.apply`; None is what it does by itself.
    """

    name: str
    method: Method
    keep_rate: float | None = None
    threshold: float | None = None
    schedule: Schedule | None = None
    blocks: tuple[int, ...] | None = None
    proportional: bool | None = None
    acts: Place | None = None
    unread: str | None = None

    @property
    def budget(self) -> dict[str, Any]:
        """keep_rate, threshold, and schedule as its text: one of them, the others None."""
        schedule = None if self.schedule is None else str(self.schedule)
        return {"keep_rate": self.keep_rate, "threshold": self.threshold, "schedule": schedule}

    @property
    def budget_text(self) -> str:
        """The budget, for people."""
        return describe_budget(self.budget)

    @property
    def method_text(self) -> str:
        return method_text(self.method)

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
            acts=self.acts,
            unread="keep" if self.unread is None else self.unread,
        )


def describe_budget(budget: Mapping[str, Any]) -> str:
    """A `Variant.budget`, or a record that holds one, in a few words; none for the dense model.

    >>> describe_budget({"keep_rate": 0.5}), describe_budget({"schedule": "linear:16"}), describe_budget({})
    ('keep 0.5', 'linear:16', '')
    """
    if budget.get("keep_rate") is not None:
        return f"keep {budget['keep_rate']:g}"
    if budget.get("threshold") is not None:
        return f"threshold {budget['threshold']:g}"
    return budget.get("schedule") or ""


def variants_of(
    methods: Sequence[str],
    *,
    keep_rates: Sequence[float] = (),
    thresholds: Sequence[float] = (),
    schedules: Sequence[str | Schedule] = (),
    linkages: Sequence[str] | None = None,
    features: str | None = None,
    blocks: Sequence[int] | None = None,
    proportional: bool | None = None,
    acts: Place | None = None,
    unread: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Variant]:
    """Every method at every budget, repeated values once; ValueError for what is not known or goes with no method.

    methods: names, or texts such as "atc:features=values".
    linkages, features: as in a method's text, for the methods that have them; None is their default.
    blocks: of keep rates and thresholds; a schedule has its own.
    options: further ones, by name, for the methods that have them.
    """
    for rate in keep_rates:
        Stages(rate, blocks)  # raises for what is no rate, before a model is built
    parsed = [as_schedule(schedule) for schedule in schedules]
    if parsed and blocks is not None:
        raise ValueError(f"blocks={tuple(blocks)} go with keep rates and thresholds, and not with schedule={parsed[0]}")
    given = {**(options or {}), **({} if features is None else {"features": option_value(features)})}
    chosen = [method for name in dict.fromkeys(methods) for method in _instances(name, linkages, given)]
    for option, value in {"linkage": linkages, **given}.items():
        if value is not None and not any(option in method.options() for _, method in chosen):
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, methods))}")
    budgets: list[dict[str, Any]] = [{"keep_rate": rate} for rate in dict.fromkeys(keep_rates)]
    budgets += [{"threshold": threshold} for threshold in dict.fromkeys(thresholds)]
    budgets += [{"schedule": schedule} for schedule in dict.fromkeys(parsed)]
    where = None if blocks is None else tuple(blocks)
    how: dict[str, Any] = {"blocks": where, "proportional": proportional, "acts": acts, "unread": unread}
    return [Variant(name, method, **budget, **how) for budget in budgets for name, method in chosen]


def tuned_variant(source: str) -> Variant:
    """What `agglo tune` found: source is its file, or the name of a ready-made result."""
    given = tuned.arguments(source)
    how = {name: given.pop(name) for name in _HOW if name in given}
    schedule = given.pop("schedule", None)
    method = create(given.pop("method"), **given)
    return Variant(
        f"tuned {Path(source).stem}", method, schedule=None if schedule is None else as_schedule(schedule), **how
    )


def _instances(text: str, linkages: Sequence[str] | None, given: Mapping[str, Any]) -> list[tuple[str, Method]]:
    """Names and methods of one text: every linkage asked for, unless the text has one of its own."""
    method, written = parse_method(text), split_method_text(text)[1].keys()
    options = {option: value for option, value in given.items() if option in method.options()}
    if clash := sorted(written & options.keys()):
        raise ValueError(f"{clash[0]}={options[clash[0]]!r} and method={text!r}: give {clash[0]} once")
    base = {**method.options(), **options}
    if "linkage" not in base:
        return [(text, create(method.name, **base))]
    each = [base["linkage"]] if "linkage" in written or not linkages else map(option_value, dict.fromkeys(linkages))
    found = [create(method.name, **{**base, "linkage": linkage}) for linkage in each]
    others = ",".join(f"{name}={option_text(method.options()[name])}" for name in sorted(written - {"linkage"}))
    return [(f"{method.name} {option_text(one.options()['linkage'])}{others and f' {others}'}", one) for one in found]
