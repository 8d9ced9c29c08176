"""A look at what was merged where: `with agglo.trace(model) as t: model(x)`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods import Outcome


@dataclass(frozen=True)
class Step:
    """One reduction: at which block, what the method decided about the tokens there, and all reductions so far."""

    block: int
    outcome: Outcome
    total: Grouping


@dataclass
class Trace:
    """What forward passes reported, one list of steps each, whole even when several threads run the model.

    The properties speak of the latest pass.
    """

    passes: list[list[Step]] = field(default_factory=list)

    def record(self, steps: list[Step]) -> None:
        """Called by the loop over blocks at its end."""
        self.passes.append(steps)

    @property
    def steps(self) -> list[Step]:
        """The reductions of the latest pass, in order."""
        if not self.passes:
            raise RuntimeError("nothing was traced: run the model inside `with agglo.trace(model) as t:`")
        return self.passes[-1]

    @property
    def groupings(self) -> dict[int, Grouping]:
        """By block: the group of each original token after that block (prefix tokens first)."""
        return {step.block: step.total for step in self.steps}

    @property
    def loss(self) -> Tensor | None:
        """The methods' extra losses of the latest pass, summed; None where there are none."""
        total: Tensor | None = None
        for step in self.steps:
            if step.outcome.loss is not None:
                total = step.outcome.loss if total is None else total + step.outcome.loss
        return total
