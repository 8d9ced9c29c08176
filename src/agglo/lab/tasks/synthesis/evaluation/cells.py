"""The reductions of a diffusion model that are generated side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agglo import patch
from agglo.checks import choice
from agglo.config import ReductionConfig
from agglo.methods.registry import find

DENSE = "dense"
OWN, PAPER = "own", "paper"
VARIANTS = (OWN, PAPER)
_SUFFIXES = {OWN: "", PAPER: f"-{PAPER}"}
# The paper compares block inputs and adds nothing to the attention logits.
_OPTIONS: dict[str, dict[str, Any]] = {OWN: {}, PAPER: {"features": "tokens", "proportional": False}}


class GenerationCell(NamedTuple):
    """One reduction of a diffusion model and the name of its folder; the config is None for the dense model."""

    name: str
    config: ReductionConfig | None = None

    def apply(self, model: Any) -> None:
        """Reduce a pipeline or model this way, in place of any other."""
        if self.config is None:
            patch.remove(model)
        else:
            patch.apply(model, self.config)


def cells_of(
    methods: Sequence[str],
    keep_rates: Sequence[float] = (),
    *,
    linkages: Sequence[str] = ("average",),
    variants: Sequence[str] = (OWN,),
    common: Mapping[str, Any] | None = None,
    of_method: Mapping[str, Any] | None = None,
) -> list[GenerationCell]:
    """Return every method at every keep rate, atc with every linkage and variant; repeated values once.

    Args:
        methods: "dense", and those that `agglo.apply` takes for a diffusion model.
        keep_rates: Fractions of tokens that stay.
        linkages: For atc.
        variants: For atc: "own" or "paper".
        common: Further fields of the config, for all methods.
        of_method: Options for the methods that have them.
    """
    for name in variants:
        choice("variant", name, VARIANTS)
    given = dict(of_method or {})
    reducing = [name for name in dict.fromkeys(methods) if name != DENSE]
    accepted = {name: find(name).defaults() for name in reducing}
    for option, value in given.items():
        if not any(option in options for options in accepted.values()):
            raise ValueError(f"{option}={value!r} goes with none of the methods {', '.join(map(repr, methods))}")
    if reducing and not keep_rates:
        raise ValueError(f"methods {', '.join(reducing)} need keep rates")
    atc_options: dict[str, dict[str, Any]] = {
        f"atc-{linkage}{_SUFFIXES[variant]}": {"linkage": linkage, **_OPTIONS[variant]}
        for variant in variants
        for linkage in linkages
    }
    cells = [GenerationCell(DENSE)] if DENSE in methods else []
    for rate in dict.fromkeys(keep_rates):
        for name in reducing:
            own = {option: value for option, value in given.items() if option in accepted[name]}
            for title, options in atc_options.items() if name == "atc" else [(name, {})]:
                config = ReductionConfig.of(name, keep_rate=rate, **{**(common or {}), **own, **options})
                cells.append(GenerationCell(f"{title}_keep{rate:g}", config))
    return cells
