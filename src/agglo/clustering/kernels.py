"""How the CPU kernels are compiled and run: cached on disk where a disk can be written, and on a pool of threads.

The cache goes where Numba puts it and relies on private parts of Numba, whose versions pyproject.toml bounds. The
threads are our own: kernels release the GIL, and Numba's threading layers are not safe for many callers at once
(workqueue aborts the process when two Python threads call) nor after a fork (OpenMP).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import numba
import numpy as np
from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile
from torch import Tensor

# Numba's cache notices changes in the file of a kernel, not in kernels it calls from other files: all of them count.
_FILES = sorted(
    [Path(__file__), *Path(__file__).parents[1].glob("**/cpu/*.py"), *Path(__file__).parents[1].glob("**/cpu.py")]
)
_SOURCES = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()


class _Files(IndexDataCacheFile):
    """One file per signature, named after it. Processes that compile at once overwrite each other's Numba index."""

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
        except (OSError, RuntimeError) as error:  # a full disk, or LLVM kept the code ("no compiled object yet")
            warnings.warn(f"a compiled kernel is not kept for the next process: {error}", RuntimeWarning, stacklevel=2)


class _Notice(event.Listener):
    """Says once what is going on, if compiling kernels takes more than two seconds in all."""

    def __init__(self) -> None:
        self._stack: list[str] = []  # what is being compiled, one function for another
        self._left = 2.0  # seconds

    def on_start(self, compiling: Any) -> None:
        self._stack.append(compiling.data["dispatcher"].py_func.__module__)
        if len(self._stack) == 1 and self._left > 0 and self._stack[0].startswith("agglo."):
            self._began, self._timer = time.monotonic(), Timer(self._left, self._say)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, compiling: Any) -> None:
        module = self._stack.pop()
        if not self._stack and self._left > 0 and module.startswith("agglo."):
            self._timer.cancel()
            self._left -= time.monotonic() - self._began

    def _say(self) -> None:
        self._left = 0.0
        logging.getLogger("agglo").warning("agglo compiles its CPU kernels: a few seconds, once per machine")


event.register("numba:compile", _Notice())


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    # Kernels never allocate, so reference counts are switched off: for short rows they cost more than the loops.
    flags = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True, **options}
    return numba.njit(**flags)(function)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, on first call, a function that Python calls. It must not allocate."""
    compiled = _compile(function)
    if not numba.config.DISABLE_JIT:
        try:
            compiled._cache = _Cache(function)
        except RuntimeError as error:  # Numba found no writable folder beside the source nor in the user's cache
            if "cannot cache function" not in str(error):
                raise
            warnings.warn(
                "no folder can be written to keep compiled kernels in: every process compiles agglo's kernels anew "
                "(the environment variable NUMBA_CACHE_DIR can name a folder)",
                RuntimeWarning,
                stacklevel=1,
            )
    return compiled


def inner(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function that only kernels call, as part of them. It must not allocate."""
    return _compile(function, no_cpython_wrapper=True, **options)


def as_numbers(tensor: Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the memory of a tensor on the CPU, from its first number to its last one, and its strides.

    A kernel that knew an array as strided would use no vector instructions. The last stride is 1, if need be of a copy.
    """
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    strides = tensor.stride()
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    return tensor.detach().as_strided((span,), (1,)).numpy(), strides


_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    """Forget the pool, whose threads do not survive a fork, and the lock, which may have been held during it."""
    global _lock, _pool, _pool_size
    _lock, _pool, _pool_size = Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(task: Callable[..., object], parts: int, *arguments: object) -> None:
    """Call task(part, parts, *arguments) for every part, each on another thread if there are so many.

    Parts of a call are taken, not assigned, and a thread that has not begun when all parts are taken is not waited for:
    25 ms for one image of 1024 tokens on 2 cores at a load of 7, where torch's OpenMP threads took 136 ms.
    """
    global _pool, _pool_size
    if parts == 1:
        task(0, 1, *arguments)
        return
    numbers = itertools.count()

    def worker() -> None:
        while (part := next(numbers)) < parts:
            task(part, parts, *arguments)

    with _lock:
        if _pool is None or _pool_size < parts - 1:
            _pool, _pool_size = ThreadPoolExecutor(parts - 1, thread_name_prefix="agglo"), parts - 1
        futures = [_pool.submit(worker) for _ in range(parts - 1)]
    worker()
    for future in futures:
        if not future.cancel():
            future.result()
