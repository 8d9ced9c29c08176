"""What a visitor chose, as a config and as the line of Python that does the same, and what a pass with it gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agglo.config import ReductionConfig
from agglo.drawing.groups import Ints
from agglo.lab.evaluation.configs import row_name
from agglo.methods import list_methods
from agglo.methods.registry import find
from agglo.patch import apply, remove, report


def methods() -> list[str]:
    """Return the methods that need no training, the best known first."""
    names = [info.name for info in list_methods() if not info.learns]
    return sorted(names, key=lambda name: (name not in ("atc", "tome"), name))


def choose(
    method: str, linkage: str = "average", *, keep_rate: float | None = None, threshold: float | None = None
) -> ReductionConfig:
    """Return a method with a keep rate or a threshold; the linkage is for atc alone.

    A text such as "tome:keep_rate=0.7" in place of the method's name is a config with a budget of its own.
    """
    if ":" in method:
        return ReductionConfig.parse(method)
    options: dict[str, Any] = {"linkage": linkage} if method == "atc" else {}
    if "seed" in find(method).defaults():  # a method that draws: alike for every visitor, and in the line of Python
        options["seed"] = 0
    return ReductionConfig.of(method, keep_rate=keep_rate, threshold=threshold, **options)


def python_line(config: ReductionConfig | None) -> str:
    """Return the call that does the same.

    >>> python_line(choose("atc", "single", keep_rate=0.5))
    "agglo.apply(model, 'atc', keep_rate=0.5, linkage='single')"
    """
    if config is None:
        return "agglo.remove(model)"
    given = [f"{name}={value!r}" for name, value in config.to_dict().items() if name not in ("version", "method")]
    return f"agglo.apply(model, {', '.join([repr(config.method), *given])})"


def dense_size(model: Any) -> tuple[int, float]:
    """Return the patch tokens and GFLOPs of a dense model. It is dense afterwards."""
    found: Any = report(apply(model, "atc", keep_rate=1.0))
    remove(model)
    return found.n_tokens, found.gflops_before


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one pass took and gave. The tasks add their outputs."""

    config: ReductionConfig | None  # None is the dense model
    refused: str | None = None  # why the config cannot be applied; then nothing else is known
    seconds: float = 0.0
    gflops: float | None = None  # multiply-adds in 1e9; None where they are not counted
    counts: list[int] = field(default_factory=list)  # patch tokens after each reduction
    stages: dict[int, Ints] = field(default_factory=dict)  # by block, the group of every patch (h, w) after it

    @property
    def title(self) -> str:
        if self.config is None:
            return "dense"
        return row_name(self.config.method, {k: v for k, v in self.config.options.items() if k != "seed"})

    @property
    def line(self) -> str:
        return python_line(self.config)
