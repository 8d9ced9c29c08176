"""How the CPU kernels are compiled: without the GIL, cached on disk where a disk can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        # Numba looks for a writable folder beside the source, then in the user's cache; without either it raises here,
        # and compiling anew in every process is better than not running.
        if "cannot cache function" not in str(error):
            raise
        return numba.njit(**options)(function)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on first call."""
    return _compile(function)


def jit_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that allocates nothing: no reference counts, which for short rows cost more than the loops."""
    return _compile(function, _nrt=False)


def jit_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a leaf kernel whose sums may be taken in any order, which lets them use vector instructions."""
    return _compile(function, _nrt=False, fastmath={"reassoc", "contract"})
