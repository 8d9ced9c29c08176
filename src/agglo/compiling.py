"""Hints for torch.compile, without importing it: torch._dynamo takes over a second, which most programs never need."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
T = TypeVar("T")


def constant_result(function: F) -> F:
    """Let torch.compile call the function while it compiles and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, which imports torch._dynamo to set this one attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Keep a function out of compiled graphs: `torch.compiler.disable`, applied at the first call."""
    disabled: list[Callable[P, T]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
