"""The cells of a grid: one model, dense and reduced in every way asked for, each with its token counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agglo.experiments.checkpoints import load_method
from agglo.experiments.devices import new_accelerator
from agglo.experiments.variants import Variant
from agglo.hosts.swap import UnsupportedModelError
from agglo.patching import apply, reduction, remove

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Cell:
    """One row of the table. about: what tells it from the others. reason: why it cannot run, if it cannot."""

    about: dict[str, Any]
    variant: Variant | None = None
    reason: str | None = None

    @property
    def title(self) -> str:
        return self.about["name"] if self.variant is None else f"{self.about['name']}, {self.variant.budget_text}"


class Reducible:
    """A model that is reduced in one way after another.

    learned: what methods have learned, by name; None where they are to start afresh, as the model did.
    source: of what they learned, in words.
    """

    def __init__(self, model: nn.Module, learned: Mapping[str, Tensor] | None, source: str) -> None:
        self.model, self.learned, self.source = model, learned, source

    def apply(self, variant: Variant | None) -> None:
        """The model as a cell wants it, and chance where it starts for every cell; None is the dense model."""
        torch.manual_seed(0)
        remove(self.model)
        if variant is not None:
            variant.apply(self.model)
            if self.learned is not None:
                load_method(self.model, self.learned, self.source)

    def cells(self, variants: Sequence[Variant], *, dense: bool, tokens: int | None = None) -> list[Cell]:
        """Every cell with its token counts; one that cannot run says why, unless none can.

        tokens: of an image, which the counts are for; None is the model's own number.
        """
        reduced = [self._reduced(variant, tokens) for variant in variants]
        if reduced and all(cell.reason is not None for cell in reduced):
            raise ValueError(reduced[0].reason)
        return ([self._dense(tokens)] if dense else []) + reduced

    def _reduced(self, variant: Variant, tokens: int | None) -> Cell:
        about: dict[str, Any] = {
            "name": variant.name,
            "method": variant.method_text,
            **variant.budget,
            "blocks": None if variant.blocks is None else list(variant.blocks),
            "proportional": variant.proportional,
            **{name: value for name in ("acts", "unread") if (value := getattr(variant, name)) is not None},
        }
        try:
            self.apply(variant)
            found = reduction(self.model, tokens)
        except ValueError as error:
            return Cell(about, variant, str(error))
        assert found is not None
        counted = {"counts": found.counts, "varies": found.varies, "gflops": found.gflops_after}
        return Cell({**about, **counted}, variant)

    def _dense(self, tokens: int | None) -> Cell:
        about = {"name": "dense", "method": None, "keep_rate": None, "blocks": None, "proportional": None}
        remove(self.model)
        try:
            # What keeps every token costs what the dense model costs, and says how many there are.
            apply(self.model, "atc", keep_rate=1.0)
        except UnsupportedModelError:
            # It can be evaluated as it is, all the same.
            return Cell({**about, "counts": None, "varies": "no", "gflops": None})
        found = reduction(self.model, tokens)
        assert found is not None
        return Cell({**about, "counts": found.counts, "varies": "no", "gflops": found.gflops_before})


def one_of_several(device: str) -> Accelerator | None:
    """Accelerate's part of this process, if it is one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    # What Accelerate was configured for is training: precision is here what --dtype says.
    return new_accelerator(cpu=torch.device(device).type == "cpu", mixed_precision="no")
