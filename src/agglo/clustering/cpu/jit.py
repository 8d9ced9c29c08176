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


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, on first call, a function that Python calls. It must not allocate: reference counts are off, which for
    short rows cost more than the loops."""
    return _compile(function, _nrt=False)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call: without wrappers for Python, which take longer than the function."""
    return _compile(function, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inner_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """An inner function whose sums may be taken in any order, which lets them use vector instructions."""
    options = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _compile(function, fastmath={"reassoc", "contract"}, **options)
