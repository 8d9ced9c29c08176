"""The reductions of a diffusion model that are generated side by side."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agglo import patching
from agglo.hosts.diffusion.tome import GridToMe
from agglo.methods import create

DENSE = "dense"
OWN, PAPER = "own", "paper"
VARIANTS = (OWN, PAPER)


@dataclass(frozen=True)
class Cell:
    """One of them. name: of its folder. options: what `agglo.apply` gets; none for the model as it is."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, model: Any) -> None:
        """Reduce a pipeline or model this way, in place of any other."""
        if self.options:
            patching.apply(model, **self.options)
        else:
            patching.remove(model)


def cells_of(
    methods: Sequence[str],
    keep_rates: Sequence[float] = (),
    *,
    linkages: Sequence[str] = ("average",),
    variants: Sequence[str] = (OWN,),
    common: Mapping[str, Any] | None = None,
    of_method: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every method at every keep rate, atc with every linkage and variant; repeated values once.

    methods: dense, and those that `agglo.apply` takes for a diffusion model. variants: own, paper; of atc.
    common: further options of `agglo.apply`, for all. of_method: options for the methods that have them.
    """
    for name in variants:
        if name not in VARIANTS:
            raise ValueError(f"variant={name!r} is not known; accepted: {', '.join(map(repr, VARIANTS))}")
    given = dict(of_method or {})
    reducing = [name for name in dict.fromkeys(methods) if name != DENSE]
    accepted = {name: _options(name) for name in reducing}
    for option, value in given.items():
        if not any(option in options for options in accepted.values()):
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, methods))}")
    if reducing and not keep_rates:
        raise ValueError(f"methods {', '.join(reducing)} need keep rates")
    cells = [Cell(DENSE)] if DENSE in methods else []
    for rate in dict.fromkeys(keep_rates):
        for name in reducing:
            own = {option: value for option, value in given.items() if option in accepted[name]}
            for named, options in _kinds(name, linkages, variants):
                every = {"method": name, "keep_rate": rate, **(common or {}), **own, **options}
                cells.append(Cell(f"{named}_keep{rate:g}", every))
    return cells


def _kinds(name: str, linkages: Sequence[str], variants: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    if name != "atc":
        return [(name, {})]
    return [
        (f"atc-{linkage}" + (f"-{PAPER}" if variant == PAPER else ""), _atc(linkage, variant))
        for variant in dict.fromkeys(variants)
        for linkage in dict.fromkeys(linkages)
    ]


def _atc(linkage: str, variant: str) -> dict[str, Any]:
    return {"linkage": linkage, **({"variant": PAPER} if variant == PAPER else {})}


def _options(name: str) -> frozenset[str]:
    """What a method of this name can be told; ValueError if there is none."""
    return frozenset(inspect.signature(GridToMe).parameters) if name == "tome" else frozenset(create(name).options())
