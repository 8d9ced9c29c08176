"""The reductions of a diffusion model that are generated side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from agglo import patch
from agglo.config import ReductionConfig
from agglo.text import parse_call

DENSE = "dense"


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


def cells_of(methods: Sequence[str], keep_rates: Sequence[float] = ()) -> list[GenerationCell]:
    """Return every method at every keep rate, repeated ones once, the dense model first.

    Args:
        methods: "dense", names of methods, or texts with their options and fields of the config.
        keep_rates: Fractions of tokens that stay.

    >>> [cell.name for cell in cells_of(["dense", "atc:linkage=single,every=2"], [0.5])]
    ['dense', 'atc-linkage=single-every=2_keep0.5']
    """
    reducing = [text for text in dict.fromkeys(methods) if text != DENSE]
    if reducing and not keep_rates:
        raise ValueError(f"methods {', '.join(reducing)} need keep rates")
    cells = [GenerationCell(DENSE)] if DENSE in methods else []
    for rate in dict.fromkeys(keep_rates):
        for text in reducing:
            name, values, options = parse_call(text)
            if values:
                raise ValueError(f"method={text!r}: write name:key=value")
            config = ReductionConfig.of(name, keep_rate=rate, **options)
            cells.append(GenerationCell(f"{re.sub('[^a-zA-Z0-9_.=]+', '-', text)}_keep{rate:g}", config))
    return cells
