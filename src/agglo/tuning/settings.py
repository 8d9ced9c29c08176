"""What a search is asked for, and the settings that are seldom needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from agglo.checks import number
from agglo.methods.registry import find
from agglo.models.outputs import call

Output = Callable[[Any, Any], Any]
_BOUNDS = {"speedup": (1, math.inf), "max_drop": (0, 100), "gflops": (0, 1)}  # above the one, and at most the other


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of `agglo.tune` that are seldom needed.

    Args:
        methods: Names of methods, each searched for its own best schedule; the best of all is chosen. None is "atc" and
            "tome", or "tomesd" for a diffusion model.
        output: Function of (model, batch) that returns the tensor, or tensors, to compare; it is also what is timed.
            Logits (B, classes) are compared by their KL divergence, anything else by its relative error.
        batch_size: Images of the batch that is timed; None is 64, or the size of the batches.
        candidates: How many candidates of each method are compared, in place of as many as fit into the minutes. With
            `gflops` the search is then the same on every machine.
        seed: Decides which images are searched on and which candidates are drawn.
        tower: Name of the submodule to reduce, for models with several transformers.
        n_tokens: Patch tokens of an image, for diffusion models that have no size of their own.
        name: Name of the model in the report; None is the name of its class.
        quiet: Whether no progress is shown.

    >>> from agglo.tuning import TuneSettings
    >>> settings = TuneSettings(candidates=50, seed=1)  # agglo.tune(model, images, gflops=0.5, settings=settings)
    """

    methods: Sequence[str] | None = None
    output: Output | None = None
    batch_size: int | None = None
    candidates: int | None = None
    seed: int = 0
    tower: str | None = None
    n_tokens: int | None = None
    name: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("candidates", 2), ("n_tokens", 1), ("batch_size", 1)):
            if (value := getattr(self, name)) is not None:
                number(name, value, whole=True, minimum=minimum)
        if self.methods is None:
            return
        if isinstance(self.methods, str) or not self.methods or len(set(self.methods)) != len(self.methods):
            raise ValueError(f"methods={self.methods!r} must be a list of different names, at least one")
        for method in self.methods:
            if issubclass(find(method), nn.Module):
                raise ValueError(f"method {method!r} learns: what it does cannot be tuned without training it")


@dataclass(frozen=True)
class Target:
    """What is asked for: "speedup" (times as fast as dense), "max_drop" (points) or "gflops" (fraction of dense)."""

    kind: str
    value: float

    @classmethod
    def of(cls, **choices: float | None) -> Target:
        """Return the target that was given; exactly one must be."""
        given = [name for name, value in choices.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give one of speedup, max_drop and gflops, not {' and '.join(given) or 'none'}")
        above, below = _BOUNDS[given[0]]
        value: Any = choices[given[0]]
        return cls(given[0], float(number(given[0], value, above=above, maximum=below)))

    def __str__(self) -> str:
        return {
            "speedup": f"{self.value:g} times as fast as dense",
            "max_drop": f"at most {self.value:g} points of accuracy lost",
            "gflops": f"{self.value:g} of the dense model's GFLOPs",
        }[self.kind]


def submodule_output(name: str) -> Output:
    """Return a function that gives what a submodule returns while the whole model runs.

    Use it as `TuneSettings(output=submodule_output("neck"))`.
    """

    def output(model: nn.Module, inputs: Any) -> Any:
        seen: list[Any] = []
        with model.get_submodule(name).register_forward_hook(lambda module, given, found: seen.append(found)):
            call(model, inputs)
        return seen[-1]

    return output
