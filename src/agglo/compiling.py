"""What runs in graphs and what beside them.

Hints for torch.compile do not import it: torch._dynamo takes over a second, which most programs never need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "AGGLO_BACKEND"  # in the environment, names the backend of the clustering


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


def takes_kernels(*tensors: Tensor | None) -> bool:
    """Return whether kernels of the CPU may stand in for torch's operators on these tensors, without anybody knowing.

    Nothing compiles, traces, records or differentiates what is done to them, and no other backend is asked for.
    """
    if os.environ.get(VARIABLE, "") not in ("", "cpu"):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    records = torch.is_grad_enabled()
    for each in tensors:
        if each is not None and (type(each) is not Tensor or not each.is_cpu or (records and each.requires_grad)):
            return False
    return True
