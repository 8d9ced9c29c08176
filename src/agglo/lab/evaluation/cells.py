"""The cells of a grid: one model, dense and reduced in every way asked for, each with its token counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.models.checkpoints import load_method
from agglo.patch import apply, remove, report
from agglo.utils.devices import new_accelerator

if TYPE_CHECKING:
    from accelerate import Accelerator

_KEY = ("name", "config", "counts")


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Args:
        about: What distinguishes it from the others.
        config: How the model is reduced; None for the dense model.
        reason: Why it cannot run; None if it can.
    """

    about: dict[str, Any]
    config: ReductionConfig | None = None
    reason: str | None = None

    @property
    def key(self) -> dict[str, Any]:
        """The part of `about` by which a journal finds the result."""
        return {name: self.about[name] for name in _KEY if self.about.get(name) is not None}

    @property
    def title(self) -> str:
        return self.about["name"] if self.config is None else f"{self.about['name']}, {self.config.budget}"


class Reducible:
    """A model that is reduced in one way after another.

    Args:
        model: The model.
        learned: Weights that methods have learned, by name; None where they start afresh, as the model did.
        source: Where these weights come from, for error messages.
    """

    def __init__(self, model: nn.Module, learned: Mapping[str, Tensor] | None, source: str) -> None:
        self.model, self.learned, self.source = model, learned, source

    def apply(self, config: ReductionConfig | None) -> None:
        """Reduce the model as a cell wants it, with the same seed for every cell; None is the dense model."""
        torch.manual_seed(0)
        remove(self.model)
        if config is not None:
            apply(self.model, config)
            if self.learned is not None:
                load_method(self.model, self.learned, self.source)

    def cells(self, configs: Mapping[ReductionConfig, str], *, dense: bool, tokens: int | None = None) -> list[Cell]:
        """Return every cell with its token counts; one that cannot run says why, unless none can.

        Args:
            configs: The reductions, each with the name of its row.
            dense: Whether the dense model is a cell too, the first one.
            tokens: Patch tokens of an image, which the counts are for; None is the model's own number.
        """
        reduced = [self._reduced(config, name, tokens) for config, name in configs.items()]
        if reduced and all(cell.reason is not None for cell in reduced):
            raise ValueError(reduced[0].reason)
        return ([self._dense(tokens)] if dense else []) + reduced

    def _reduced(self, config: ReductionConfig, name: str, tokens: int | None) -> Cell:
        about: dict[str, Any] = {"name": name, "config": config.to_dict()}
        try:
            self.apply(config)
            found: Any = report(self.model, tokens)
        except ValueError as error:
            return Cell(about, config, str(error))
        return Cell({**about, "counts": found.counts, "varies": found.varies, "gflops": found.gflops_after}, config)

    def _dense(self, tokens: int | None) -> Cell:
        about: dict[str, Any] = {"name": "dense", "config": None, "counts": None, "varies": "no", "gflops": None}
        remove(self.model)
        try:
            # What keeps every token costs what the dense model costs, and says how many there are.
            found: Any = report(apply(self.model, "atc", keep_rate=1.0), tokens)
        except UnsupportedModelError:  # it can be evaluated as it is, all the same
            return Cell(about)
        return Cell({**about, "counts": found.counts, "gflops": found.gflops_before})


def one_of_several(device: str) -> Accelerator | None:
    """Return this process's Accelerator if it is one of several, otherwise None."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    # What Accelerate was configured for is training: precision is here what --dtype says.
    return new_accelerator(cpu=torch.device(device).type == "cpu", mixed_precision="no")
