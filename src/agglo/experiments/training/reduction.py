"""The settings of a run that say how tokens are reduced while it trains, and what a method adds to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from agglo.hosts.registry import applied_modules
from agglo.methods import create
from agglo.patching import apply, trace
from agglo.schedule import Stages, parse_schedule
from agglo.tracing import Trace

# The settings that say how many tokens stay, of which a run has one, and all that mean nothing without a method.
BUDGETS = ("keep_rate", "threshold", "schedule")
OF_METHOD = (*BUDGETS, "linkage", "proportional", "method_options")


@dataclass(frozen=True)
class ReductionSettings:
    """What settings of a task build on."""

    method: str = "none"
    """atc, tome, evit, ... or none to train the dense model"""
    keep_rate: float | None = None
    """fraction of patch tokens that stays at each of three stages"""
    threshold: float | None = None
    """in place of keep_rate: the cosine distance up to which tokens merge at each of three stages"""
    schedule: str | None = None
    """in place of keep_rate: such as stages:0.9,0.7,0.5@3,6,9, constant:16 or linear:16"""
    linkage: str | None = None
    """of atc: single, average, complete"""
    proportional: bool | None = None
    """let merged tokens weigh as much in attention as their members; none leaves it to the method"""
    method_options: dict[str, Any] = field(default_factory=dict)
    """further options of the method, by name"""

    @property
    def all_method_options(self) -> dict[str, Any]:
        """Of the method, with its linkage."""
        return {**self.method_options, **({} if self.linkage is None else {"linkage": self.linkage})}

    def require_reduction(self, of_method: Sequence[str] = OF_METHOD) -> None:
        """A method with a budget it can have, or neither.

        of_method: the settings that mean nothing without one.
        """
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if self.method == "none":
            for name in of_method:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r} needs a method, such as --method atc")
            return
        create(self.method, **self.all_method_options)
        if not given:
            needed = f"{', '.join(BUDGETS[:-1])} and {BUDGETS[-1]}"
            raise ValueError(
                f"method={self.method!r} needs one of {needed}, such as --keep-rate 0.5 or --schedule linear:16"
            )
        if len(given) > 1:
            both = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"{both}: give one of them; the others are none")
        if self.keep_rate is not None:
            Stages(self.keep_rate)
        if self.schedule is not None:
            parse_schedule(self.schedule)


def reduce(model: nn.Module, settings: ReductionSettings) -> None:
    """Apply the settings' reduction to a model."""
    apply(
        model,
        settings.method,
        keep_rate=settings.keep_rate,
        threshold=settings.threshold,
        schedule=None if settings.schedule is None else parse_schedule(settings.schedule),
        proportional=settings.proportional,
        **settings.all_method_options,
    )


def heard(model: nn.Module) -> AbstractContextManager[Trace | None]:
    """A trace of the model's passes, for what its method adds to a loss; None where nothing is applied to it."""
    return trace(model) if applied_modules(model) else nullcontext()


def method_loss(record: Trace | None) -> Tensor | None:
    """What the method adds to the loss of the pass that a trace heard; None if nothing."""
    return None if record is None or record.loss is None else record.loss.float()
