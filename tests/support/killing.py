"""Runs that die while they write, and whether what they left is the same in the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


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


def die_after_state(processor_seconds: float) -> None:
    """Die as abruptly so much processor time after the next state is in place, whatever then runs.

    Not after so much time: a run that has a core for itself would be over before a busy machine kills it.
    """
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        replace(source, target)
        if os.path.basename(target) == "state.pt":
            os.replace = replace
            signal.setitimer(signal.ITIMER_VIRTUAL, processor_seconds)  # SIGVTALRM, which nobody handles

    os.replace = watched


def require_same_files(one: Path, other: Path, names: Sequence[str]) -> None:
    """The same files in two folders; of weights the tensors, since safetensors writes metadata in any order."""
    for name in names:
        if name.endswith(".safetensors"):
            require_equal(load_file(one / name), load_file(other / name), name)
        else:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


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
