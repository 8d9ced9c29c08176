"""The settings of a run that say how tokens are reduced while it trains, and what a method adds to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from agglo.config import ReductionConfig
from agglo.hosts.registry import applied_modules
from agglo.lab.options import option
from agglo.patch import trace
from agglo.tracing import Trace

# The settings that say how many tokens stay, of which a run has one, and all that mean nothing without a method.
BUDGETS = ("keep_rate", "threshold", "schedule")
OF_METHOD = (*BUDGETS, "linkage", "proportional", "method_options")


@dataclass(frozen=True)
class ReductionSettings:
    """Base class of a task's settings: the method, its budget and its options."""

    method: str = option("none", "atc, tome, evit, ... or none to train the dense model")
    keep_rate: float | None = option(None, "fraction of patch tokens that stays at each of three stages")
    threshold: float | None = option(
        None, "in place of keep_rate: the cosine distance up to which tokens merge at each of three stages"
    )
    schedule: str | None = option(
        None, "in place of keep_rate: such as stages:0.9,0.7,0.5,blocks=[3,6,9], constant:16 or linear:16"
    )
    linkage: str | None = option(None, "of atc: single, average, complete")
    proportional: bool | None = option(
        None, "let merged tokens weigh as much in attention as their members; none leaves it to the method"
    )
    method_options: dict[str, Any] = option({}, "further options of the method, by name")

    @property
    def config(self) -> ReductionConfig | None:
        """The reduction applied while the run trains; None for the dense model."""
        if self.method == "none":
            return None
        named = {name: getattr(self, name) for name in OF_METHOD[:-1] if getattr(self, name) is not None}
        return ReductionConfig.of(self.method, **named, **self.method_options)

    def require_reduction(self, of_method: Sequence[str] = OF_METHOD) -> None:
        """Raise ValueError unless there is a method with a budget, or neither it nor any setting `of_method`."""
        if self.method == "none":
            for name in of_method:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r} needs a method, such as --method atc")
        elif all(getattr(self, name) is None for name in BUDGETS):
            raise ValueError(f"method={self.method!r} needs one of keep_rate, threshold and schedule")
        _ = self.config  # raises for what does not go together


def trace_if_reduced(model: nn.Module) -> AbstractContextManager[Trace | None]:
    """Trace the model's passes, for what its method adds to a loss; yields None where nothing is applied to it."""
    return trace(model) if applied_modules(model) else nullcontext()


def method_loss(record: Trace | None) -> Tensor | None:
    """Return what the method adds to the loss of the traced pass; None if nothing."""
    return None if record is None or record.loss is None else record.loss.float()
