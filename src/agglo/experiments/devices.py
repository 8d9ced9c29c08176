"""Where and in which precision a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """A precision by its name."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; accepted: {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def require_device(name: str) -> torch.device:
    """A device by name, if it is there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} is not available here: {reason}") from error
    return device


def best_device() -> torch.device:
    """The accelerator that torch finds (cuda, mps, xpu, ...), otherwise the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def new_accelerator(**options: Any) -> Accelerator:
    """Accelerate's part of this process, in whatever precision. Accelerate remembers that of the first one and refuses
    another; but one process may train in half precision and evaluate in full precision, cell after cell."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # the processes stay connected: that is PartialState's
    return Accelerator(**options)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside, torch uses so many CPU threads; None leaves the number as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
