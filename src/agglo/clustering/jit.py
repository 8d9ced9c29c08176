"""How the CPU kernels are compiled: without the GIL, and cached on disk where a disk can be written.

The cache goes where Numba puts it (NUMBA_CACHE_DIR names another folder). It relies on private parts of Numba, whose
versions are bounded in pyproject.toml for that reason.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

# Numba's cache notices changes in the file of a kernel, not in kernels it calls from other files: all of them count.
_SOURCES = tuple(
    (str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(Path(__file__).parent.rglob("*.py"))
)


@cache  # one warning, not one per kernel
def _warn_of_no_cache() -> None:
    warnings.warn(
        "no folder to keep compiled kernels in (NUMBA_CACHE_DIR can name a writable one): every process compiles "
        "agglo's kernels anew",
        RuntimeWarning,
        stacklevel=2,
    )


def _share_safely(kernel: Any) -> None:
    """Make the kernel's cache depend on every file of this folder, and safe for processes that fill it at once.

    Numba numbers the files of compiled code, one for each signature. Two processes that compile for different
    signatures at the same time take the same number, and the index may then lead to code for other arguments. Here
    files are named after what they hold.
    """
    cache_file = kernel._cache._cache_file
    cache_file._source_stamp = _SOURCES
    save, pattern = cache_file.save, cache_file._data_name_pattern

    def save_under_own_name(key: Any, data: Any) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        cache_file._data_name_pattern = pattern.replace("{number:d}", f"{digest}.{{number:d}}")
        save(key, data)

    cache_file.save = save_under_own_name


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Kernels never allocate, so reference counts are switched off: for short rows they cost more than the loops.
    options = {"nogil": True, "error_model": "numpy", "_nrt": False, **options}
    if numba.config.DISABLE_JIT:
        return numba.njit(**options)(function)
    try:
        kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # Numba found no writable folder beside the source nor in the user's cache
        if "cannot cache function" not in str(error):
            raise
        _warn_of_no_cache()
        return numba.njit(**options)(function)
    _share_safely(kernel)
    return kernel


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, on first call, a function that Python calls. It must not allocate."""
    return _compile(function)


def inner(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function that only kernels call, without the wrappers for Python. It must not allocate."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def inner_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an inner function whose sums may be taken in any order, which lets them use vector instructions."""
    return inner(function, fastmath={"reassoc", "contract"})
