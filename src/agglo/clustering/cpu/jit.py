"""How the CPU kernels are compiled: without the GIL, cached on disk where a disk can be written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

# Numba's cache notices changes in the file of a kernel, not in kernels it calls from other files: all of them count.
_SOURCES = tuple(
    (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(Path(__file__).parent.glob("*.py"))
)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        kernel = numba.njit(cache=True, **options)(function)
        if not numba.config.DISABLE_JIT:
            kernel._cache._cache_file._source_stamp = _SOURCES
        return kernel
    except RuntimeError as error:
        # Numba looks for a writable folder beside the source, then in the user's cache; without either it raises here,
        # and compiling anew in every process is better than not running.
        if "cannot cache function" not in str(error):
            raise
        warnings.warn(
            "no folder to keep agglo's compiled kernels in: every process compiles them anew; "
            "NUMBA_CACHE_DIR can name a writable one",
            RuntimeWarning,
            stacklevel=2,
        )
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
