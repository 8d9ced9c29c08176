"""What a visitor chose, as the arguments of `agglo.apply` and as the line of Python that does the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agglo.clustering.arguments import LINKAGES
from agglo.methods import list_methods
from agglo.methods.registry import find

ATC = "atc"


def methods() -> list[str]:
    """Those that need no training, the best known first."""
    names = [info.name for info in list_methods() if not info.learns]
    return sorted(names, key=lambda name: (name not in (ATC, "tome"), name))


@dataclass(frozen=True)
class Chosen:
    """A reduction. title: in a few words. arguments: of `agglo.apply`. tuned: the name of the ready-made result whose
    answer it is, if it is one."""

    title: str
    arguments: Mapping[str, Any]
    tuned: str | None = None

    @property
    def line(self) -> str:
        """The call that does the same.

        >>> choose("atc", "single", keep_rate=0.5).line
        'agglo.apply(model, "atc", keep_rate=0.5, linkage="single")'
        """
        if self.tuned is not None:
            return f"agglo.apply(model, tuned={json.dumps(self.tuned)})"
        return f"agglo.apply(model, {written(self.arguments)})"


def choose(method: str, linkage: str, *, keep_rate: float | None = None, threshold: float | None = None) -> Chosen:
    """A method with a keep rate or a threshold; linkage is for atc alone. ValueError for names that do not exist."""
    options = find(method).defaults()
    budget = {"keep_rate": keep_rate, "threshold": threshold}
    arguments: dict[str, Any] = {"method": method}
    arguments |= {name: _number(name, value) for name, value in budget.items() if value is not None}
    if method == ATC:
        if linkage not in LINKAGES:
            raise ValueError(f"linkage={linkage!r} is not known; accepted: {', '.join(map(repr, LINKAGES))}")
        arguments["linkage"] = linkage
    if "seed" in options:  # a method that draws: alike for every visitor, and in the line of Python
        arguments["seed"] = 0
    return Chosen(f"{method} {linkage}" if method == ATC else method, arguments)


def choose_diffusion(method: str, linkage: str, keep_rate: float) -> Chosen:
    """The same for a diffusion model, whose ToMe draws where its batches are even."""
    chosen = choose(method, linkage, keep_rate=keep_rate)
    return replace(chosen, arguments={**chosen.arguments, "seed": 0}) if method == "tome" else chosen


def written(arguments: Mapping[str, Any]) -> str:
    """Arguments of `agglo.apply` as one writes them, the method first and without its name."""
    others = {name: value for name, value in arguments.items() if name != "method"}
    return ", ".join([_word(arguments["method"]), *(f"{name}={_word(value)}" for name, value in others.items())])


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} is not a number")
    return float(value)
