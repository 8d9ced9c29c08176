"""What a search is asked for, and the settings that are seldom needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agglo.checks import number
from agglo.tuning.objectives import Objective

_START = 1.7  # times as fast as dense: where the search for an accuracy looks first
_SPEEDS = (1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.7)  # of the front
_GFLOPS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)
_BOUNDS = {"speedup": (1, math.inf), "max_drop": (0, 100), "gflops": (0, 1)}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of `agglo.tune` that are seldom needed.

    Args:
        objective: How outputs are compared: "kl" for logits, "relative" for anything else, or a function of the dense
            and the reduced output that returns a value for each image, (B,). "auto" is "kl" where outputs are logits.
        candidates: How many candidates of each method are compared, in place of as many as fit into the minutes. With
            `gflops` the search is then the same on every machine.
        seed: Decides which images are searched on and which candidates are drawn.
        tower: Name of the submodule to reduce, for models with several transformers.
        n_tokens: Patch tokens of an image, for diffusion models that do not tell.
        name: Name of the model in the report; None is the name of its class.
        quiet: Whether no progress is shown.

    >>> from agglo.tuning import TuneSettings
    >>> settings = TuneSettings(candidates=50, seed=1)  # agglo.tune(model, images, gflops=0.5, settings=settings)
    """

    objective: str | Objective = "auto"
    candidates: int | None = None
    seed: int = 0
    tower: str | None = None
    n_tokens: int | None = None
    name: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("candidates", 2), ("n_tokens", 1)):
            if (value := getattr(self, name)) is not None:
                number(name, value, whole=True, minimum=minimum)


@dataclass(frozen=True)
class Target:
    """What is asked for: "speedup" (times as fast as dense), "max_drop" (points) or "gflops" (fraction of dense)."""

    kind: str
    value: float

    @classmethod
    def of(cls, *, speedup: float | None, max_drop: float | None, gflops: float | None) -> Target:
        """Return the target that was given; exactly one must be."""
        choices = {"speedup": speedup, "max_drop": max_drop, "gflops": gflops}
        given = {name: value for name, value in choices.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"give one of speedup, max_drop and gflops, not {' and '.join(given) or 'none'}")
        ((kind, value),) = given.items()
        low, high = _BOUNDS[kind]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
            raise ValueError(f"{kind}={value!r} must be a number above {low} and below {high}")
        return cls(kind, float(value))

    @property
    def by_time(self) -> bool:
        """Whether candidates are compared at equal time; otherwise at equal GFLOPs."""
        return self.kind != "gflops"

    @property
    def level(self) -> float:
        """The cost at which candidates are compared: time or GFLOPs relative to dense."""
        if self.kind == "gflops":
            return self.value
        return 1 / (self.value if self.kind == "speedup" else _START)

    @property
    def levels(self) -> list[float]:
        """The costs at which the front is followed, falling, with the target's own unless that is an accuracy."""
        around = [1 / speed for speed in _SPEEDS] if self.by_time else list(_GFLOPS)
        if self.kind != "max_drop":
            around = [self.level, *(cost for cost in around if abs(cost / self.level - 1) > 0.04)]
        return sorted(around, reverse=True)

    def __str__(self) -> str:
        return {
            "speedup": f"{self.value:g} times as fast as dense",
            "max_drop": f"at most {self.value:g} points of accuracy lost",
            "gflops": f"{self.value:g} of the dense model's GFLOPs",
        }[self.kind]
