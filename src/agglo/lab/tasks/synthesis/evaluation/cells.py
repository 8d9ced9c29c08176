"""The reductions of a diffusion model whose images are compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

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


def cells_of(methods: Sequence[str], keep_rates: Sequence[float]) -> list[GenerationCell]:
    """Return every method, with its options, at every keep rate, repeated ones once; "dense" comes first.

    >>> [cell.name for cell in cells_of(["dense", "atc:linkage=single,every=2"], [0.5])]
    ['dense', 'atc-linkage=single-every=2_keep0.5']
    """
    cells = [GenerationCell(DENSE)] if DENSE in methods else []
    for rate in dict.fromkeys(keep_rates):
        for text in dict.fromkeys(methods):
            name, values, options = parse_call(text)
            if values:
                raise ValueError(f"method={text!r}: write name:key=value")
            if text != DENSE:
                config = ReductionConfig.of(name, keep_rate=rate, **options)
                cells.append(GenerationCell(f"{re.sub('[^a-zA-Z0-9_.=]+', '-', text)}_keep{rate:g}", config))
    return cells


def relative_errors(reduced: Tensor, dense: Tensor) -> Tensor:
    """Return the relative L2 error of each image, (B,)."""
    difference = (reduced.float() - dense.float()).flatten(1).norm(dim=1)
    return difference / dense.float().flatten(1).norm(dim=1)
