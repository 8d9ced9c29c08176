"""Reductions to compare: every method with every linkage at every budget.

Each `ReductionConfig` comes with the name of its row in tables: a dict of names by config, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agglo.config import DEFAULTS, ReductionConfig
from agglo.methods.registry import find
from agglo.schedule import Schedule
from agglo.text import format_call, format_value, parse_call, parse_value

Configs = Mapping[ReductionConfig, str]


def configs_of(
    methods: Sequence[str],
    *,
    keep_rates: Iterable[float] = (),
    flops: Iterable[float] = (),
    thresholds: Iterable[float] = (),
    schedules: Iterable[str | Schedule] = (),
    linkages: Sequence[str] | None = None,
    **arguments: Any,
) -> dict[ReductionConfig, str]:
    """Return every method at every budget, each with its name; repeated ones once.

    Args:
        methods: Names, or texts such as "atc:features=values".
        keep_rates, flops, thresholds, schedules: The budgets.
        linkages: For the methods that have a linkage and do not say theirs; None is their default.
        arguments: Fields of `ReductionConfig` for all methods, and options for those that have them; None is left out.

    Raises:
        ValueError: Something is unknown, or none of the methods has an option.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    asked = []
    for text in methods:
        name, unnamed, options = parse_call(text)
        if unnamed:
            raise ValueError(f"method={text!r}: options are written option=value, not {unnamed[0]!r}")
        if not linkages or "linkage" in options or "linkage" not in find(name).defaults():
            asked.append((name, options))
        else:
            asked += [(name, {**options, "linkage": parse_value(linkage)}) for linkage in linkages]
    accepted = {*DEFAULTS, *(option for name, _ in asked for option in find(name).defaults())}
    for option, value in {**given, **({} if linkages is None else {"linkage": linkages})}.items():
        if option not in accepted:
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, methods))}")
    configs: dict[ReductionConfig, str] = {}
    budgets = {"keep_rate": keep_rates, "flops": flops, "threshold": thresholds, "schedule": schedules}
    for kind, values in budgets.items():
        for value in values:
            for name, options in asked:
                known = find(name).defaults().keys() | DEFAULTS.keys()
                fitting = {key: each for key, each in given.items() if key in known}
                if clash := sorted(options.keys() & fitting.keys()):
                    raise ValueError(f"{clash[0]}={fitting[clash[0]]!r} and method={name!r}: give {clash[0]} once")
                config = ReductionConfig.of(name, **{kind: value, **options, **fitting})
                configs.setdefault(config, row_name(name, options))
    return configs


def row_name(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of a row: a method, its linkage, and the options that were written.

    >>> row_name("atc", {"features": "values"}), row_name("random", {"seed": 1})
    ('atc average features=values', 'random:seed=1')
    """
    linkage = options.get("linkage", find(name).defaults().get("linkage"))
    if linkage is None:
        return format_call(name, (), options)
    others = ",".join(f"{key}={format_value(value)}" for key, value in sorted(options.items()) if key != "linkage")
    return f"{name} {format_value(linkage)}{others and f' {others}'}"


def budget_of(result: Mapping[str, Any]) -> str:
    """Return the budget of a result, such as "keep 0.5"; nothing for the dense model."""
    return "" if result["config"] is None else ReductionConfig.from_dict(result["config"]).budget
