"""Devices, precisions and threads by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from agglo.checks import choice

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    return DTYPES[choice("dtype", name, DTYPES)]


def require_device(name: str) -> torch.device:
    """Return the device of a name; ValueError if it is not available."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name!r} is not available here: {str(error).splitlines()[0]}") from error
    return device


def best_device() -> torch.device:
    """Return the accelerator that torch finds (cuda, mps, xpu, ...), otherwise the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def new_accelerator(**options: Any) -> Accelerator:
    """Return a new Accelerator; accelerate itself would refuse another precision than that of the first one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # the processes stay connected: that is PartialState's
    return Accelerator(**options)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch's CPU threads within a block; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
