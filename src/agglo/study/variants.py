"""The reductions a person asks for side by side: every method with every linkage at every keep rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import agglo
from agglo.methods import Method, create
from agglo.schedule import Stages


@dataclass(frozen=True)
class Variant:
    """One way to reduce a model. One of keep_rate and threshold is given.

    name: the method and what distinguishes it, as a person would type it.
    """

    name: str
    method: Method
    keep_rate: float | None = None
    threshold: float | None = None
    blocks: tuple[int, ...] | None = None
    proportional: bool | None = None

    @property
    def setting(self) -> str:
        """How far it reduces, in words."""
        return f"keep {self.keep_rate:g}" if self.keep_rate is not None else f"threshold {self.threshold:g}"

    def apply(self, model: nn.Module) -> None:
        """Reduce a model this way, in place of any other."""
        agglo.apply(
            model,
            self.method,
            keep_rate=self.keep_rate,
            threshold=self.threshold,
            blocks=self.blocks,
            proportional=self.proportional,
        )


def cross(
    names: Sequence[str],
    *,
    keep_rates: Sequence[float] = (),
    thresholds: Sequence[float] = (),
    linkages: Sequence[str] | None = None,
    features: str | None = None,
    blocks: Sequence[int] | None = None,
    proportional: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Variant]:
    """Every combination, repeated values once; ValueError for unknown values and for options no method takes.

    linkages: for the methods that have one; None is their default.
    options: further ones, by name, for the methods that have them.
    """
    for rate in keep_rates:
        Stages(rate, blocks)  # raises for what is no rate, before a model is built
    given = {**(options or {}), **({} if features is None else {"features": features})}
    chosen = [method for name in dict.fromkeys(names) for method in _instances(name, linkages, given)]
    for option, value in {"linkage": linkages, **given}.items():
        if value is not None and not any(option in method.options() for _, method in chosen):
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, names))}")
    how_far = [{"keep_rate": rate} for rate in dict.fromkeys(keep_rates)]
    how_far += [{"threshold": threshold} for threshold in dict.fromkeys(thresholds)]
    where = None if blocks is None else tuple(blocks)
    return [Variant(n, m, **far, blocks=where, proportional=proportional) for far in how_far for n, m in chosen]


def _instances(name: str, linkages: Sequence[str] | None, given: Mapping[str, Any]) -> list[tuple[str, Method]]:
    accepted = create(name).options()
    options = {option: value for option, value in given.items() if option in accepted}
    if "linkage" not in accepted:
        return [(name, create(name, **options))]
    each = dict.fromkeys(linkages or [accepted["linkage"]])
    return [(f"{name} {linkage}", create(name, linkage=linkage, **options)) for linkage in each]
