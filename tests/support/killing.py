"""Runs that die while they write, and whether what they left is the same in the end."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch


def die_at_replacement(number: int) -> None:
    """Die by SIGKILL with half of the number-th file written, before it takes the place of the one before."""
    calls = iter(range(1, number + 1))
    replace = os.replace

    def dying(source: Any, target: Any) -> None:
        if next(calls) == number:
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dying


def require_equal(one: Any, other: Any, where: str = "") -> None:
    """The same to the last bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            require_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            require_equal(left, right, f"{where}[{index}]")
    else:
        assert one == other, where
