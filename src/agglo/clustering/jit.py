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
from numba.core.caching import FunctionCache, IndexDataCacheFile

# Numba's cache notices changes in the file of a kernel, not in kernels it calls from other files: all of them count.
_FILES = sorted([Path(__file__), *Path(__file__).parent.glob("*/cpu/*.py"), *Path(__file__).parent.glob("*/cpu.py")])
_SOURCES = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()


@cache  # one warning, not one per kernel
def _warn_of_no_cache() -> None:
    warnings.warn(
        "no folder to keep compiled kernels in (NUMBA_CACHE_DIR can name a writable one): every process compiles "
        "agglo's kernels anew",
        RuntimeWarning,
        stacklevel=2,
    )


class _Files(IndexDataCacheFile):
    """One file per signature, named after it and holding what it was compiled from; Numba's index is not used.

    Processes that compile at the same time overwrite each other's index and give the same number to files for different
    signatures, so that the index may lead to code for other arguments.
    """

    def _name(self, key: Any) -> str:
        return f"{self._index_name.removesuffix('.nbi')}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._version, self._source_stamp, data))

    def load(self, key: Any) -> Any:
        version, stamp, data = self._load_data(self._name(key))
        return data if (version, stamp) == (self._version, self._source_stamp) else None


class _Cache(FunctionCache):
    """Numba's cache of one kernel. It saves time and is never needed: whatever goes wrong with it, the kernel runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, _SOURCES)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # no file, or one that was cut short or that another version of Numba wrote
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # a full disk, or LLVM did not hand over the code ("no compiled object yet")
            warnings.warn(f"a compiled kernel is not kept for the next process: {error}", RuntimeWarning, stacklevel=2)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Kernels never allocate, so reference counts are switched off: for short rows they cost more than the loops.
    compiled = numba.njit(**{"nogil": True, "error_model": "numpy", "_nrt": False, **options})(function)
    if not numba.config.DISABLE_JIT:
        try:
            compiled._cache = _Cache(function)
        except RuntimeError as error:  # Numba found no writable folder beside the source nor in the user's cache
            if "cannot cache function" not in str(error):
                raise
            _warn_of_no_cache()
    return compiled


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, on first call, a function that Python calls. It must not allocate."""
    return _compile(function)


def inner(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function that only kernels call, without the wrappers for Python. It must not allocate."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def inner_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an inner function whose sums may be taken in any order, which lets them use vector instructions."""
    return inner(function, fastmath={"reassoc", "contract"})
