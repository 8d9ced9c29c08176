"""How the CPU kernels are compiled: without the GIL, cached on disk where a disk can be written.

The cache goes where Numba puts it (NUMBA_CACHE_DIR names another folder). It leans on parts of Numba that are not
promised to stay; where a version has them no more, kernels are compiled anew in every process, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

# Numba's cache notices changes in the file of a kernel, not in kernels it calls from other files: all of them count.
_SOURCES = tuple(
    (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(Path(__file__).parent.glob("*.py"))
)


@cache  # one warning, not one per kernel
def _warn_of_no_cache(reason: str) -> None:
    warnings.warn(f"{reason}: every process compiles agglo's kernels anew", RuntimeWarning, stacklevel=2)


def _stamp_with_all_sources(kernel: Any) -> bool:
    """Make the kernel's cache depend on every file of this folder. False if this Numba has no place to say so."""
    cache_file: Any = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if not hasattr(cache_file, "_source_stamp"):
        return False
    cache_file._source_stamp = _SOURCES
    return True


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"nogil": True, "error_model": "numpy", **options}
    if numba.config.DISABLE_JIT:
        return numba.njit(**options)(function)
    try:
        kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        # Numba looks for a writable folder beside the source, then in the user's cache; without either it raises here,
        # and compiling anew in every process is better than not running.
        if "cannot cache function" not in str(error):
            raise
        _warn_of_no_cache("no folder to keep compiled kernels in (NUMBA_CACHE_DIR can name a writable one)")
        return numba.njit(**options)(function)
    if _stamp_with_all_sources(kernel):
        return kernel
    # Cached without the stamp, a kernel would outlive changes in the kernels it calls.
    _warn_of_no_cache(f"numba {numba.__version__} has no cache that agglo can use")
    return numba.njit(**options)(function)


def _known(**options: bool) -> dict[str, bool]:
    """Those of the options that this Numba has: they only make kernels faster, or faster to compile."""
    try:
        from numba.core.cpu import CPUTargetOptions
    except ImportError:
        return {}
    return {name: value for name, value in options.items() if hasattr(CPUTargetOptions, name)}


# Kernels never allocate, so reference counts are switched off: for short rows they cost more than the loops.
_NO_COUNTS = _known(_nrt=False)
# What only kernels call needs no wrappers for Python, which take longer to compile than the function.
_NO_WRAPPERS = _known(no_cpython_wrapper=True, no_cfunc_wrapper=True)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, on first call, a function that Python calls. It must not allocate."""
    return _compile(function, **_NO_COUNTS)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call. It must not allocate."""
    return _compile(function, **_NO_COUNTS, **_NO_WRAPPERS)


def inner_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """An inner function whose sums may be taken in any order, which lets them use vector instructions."""
    return _compile(function, fastmath={"reassoc", "contract"}, **_NO_COUNTS, **_NO_WRAPPERS)
