"""What a visitor chose, as a config and as the line of Python that does the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agglo.checks import choice
from agglo.clustering.arguments import LINKAGES
from agglo.config import ReductionConfig
from agglo.methods import list_methods
from agglo.methods.registry import find
from agglo.schedule import Schedule

ATC = "atc"


def methods() -> list[str]:
    """Those that need no training, the best known first."""
    names = [info.name for info in list_methods() if not info.learns]
    return sorted(names, key=lambda name: (name not in (ATC, "tome"), name))


@dataclass(frozen=True)
class Chosen:
    """A reduction as the page shows it.

    Attributes:
        title: A few words.
        config: The reduction.
        tuned: The name of the ready-made result whose answer it is, if it is one.
    """

    title: str
    config: ReductionConfig
    tuned: str | None = None

    @property
    def line(self) -> str:
        """The call that does the same.

        >>> choose("atc", "single", keep_rate=0.5).line
        'agglo.apply(model, "atc", keep_rate=0.5, linkage="single")'
        """
        if self.tuned is not None:
            return f"agglo.apply(model, tuned={json.dumps(self.tuned)})"
        given = [f"{name}={_word(value)}" for name, value in self.config.given().items()]
        return f"agglo.apply(model, {', '.join([_word(self.config.method), *given])})"


def choose(method: str, linkage: str, *, keep_rate: float | None = None, threshold: float | None = None) -> Chosen:
    """Return a method with a keep rate or a threshold; linkage is for atc alone.

    Raises:
        ValueError: A name does not exist, or a number is out of range.
    """
    arguments: dict[str, Any] = {"keep_rate": keep_rate, "threshold": threshold}
    if method == ATC:
        arguments["linkage"] = choice("linkage", linkage, LINKAGES)
    if "seed" in find(method).defaults():  # a method that draws: alike for every visitor, and in the line of Python
        arguments["seed"] = 0
    title = f"{method} {linkage}" if method == ATC else method
    return Chosen(title, ReductionConfig.of(method, **arguments))


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(str(value) if isinstance(value, Schedule) else value)
