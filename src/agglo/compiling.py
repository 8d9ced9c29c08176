"""Hints for torch.compile, without importing it: torch._dynamo takes over a second, which most programs never need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_result(function: F) -> F:
    """Let torch.compile call the function while it compiles and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, which imports torch._dynamo to set this one attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
