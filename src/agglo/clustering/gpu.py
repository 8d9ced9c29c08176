"""Whether Triton kernels can run, and what happens where they turn out not to."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from agglo.compiling import VARIABLE, constant_result

T = TypeVar("T")
_failures: list[str] = []  # why no kernel is tried any more: of the process, as the compiler is


class Declined(ValueError):
    """A kernel cannot take this input, and may take others."""


@cache
def _lacking() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        return "no CUDA device is available"
    return ""


def why_not() -> str:
    """Return why Triton kernels cannot run on this machine; "" if they can, as far as is known."""
    return _lacking() or "".join(_failures)


def takes(tensor: Tensor) -> bool:
    """Return whether the kernels that replace tensor operations take a tensor.

    Not in files that are exported or traced: they hold tensor operations, which any machine has.
    """
    return tensor.is_cuda and not (torch.jit.is_tracing() or torch.compiler.is_exporting()) and _wanted()


@constant_result
def _wanted() -> bool:
    return os.environ.get(VARIABLE) in (None, "", "triton") and not torch.onnx.is_in_onnx_export() and not why_not()


def attempt(kernel: Callable[[], T], instead: Callable[[], T]) -> T:
    """Launch a kernel; if it cannot be compiled or launched, say so once, and do the other thing from now on."""
    if os.environ.get(VARIABLE) == "triton":
        return kernel()
    try:
        return kernel()
    except Declined:
        return instead()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        # A missing C compiler or an old GPU shows in as many kinds of errors as there are steps to a binary.
        if not _failures:
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            _failures.append(f"its first kernel failed ({reason})")
            logging.getLogger("agglo").warning(
                "agglo goes on without its Triton kernels, slower, since one cannot run here: %s. Triton needs a C "
                "compiler and a GPU that it supports; AGGLO_BACKEND=triton shows the whole error",
                reason,
            )
    return instead()
