"""Threads for kernels that release the GIL, safe for many callers at once and after a fork.

Numba's threading layers are neither: workqueue aborts the process when two Python threads call, OpenMP after a fork.

Where torch brings GNU OpenMP (its Linux builds), parts run on the very threads torch computes on. Those spin for
milliseconds after every torch operation, waiting for the next; other threads would have to share the cores with them.
Elsewhere, and in forked processes (OpenMP's threads do not survive a fork, and it waits for them forever), parts run on
a thread pool of our own.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, if it is GNU's."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if len(libraries) != 1:
        return None
    try:
        library = ctypes.CDLL(str(libraries[0]), mode=os.RTLD_NOLOAD)  # never a second copy, with threads of its own
        library.GOMP_parallel.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (OSError, AttributeError):
        return None
    return library


_lock = Lock()
_openmp = _find_openmp()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    """Threads do not survive a fork, and the lock may have been held during it."""
    global _lock, _openmp, _pool, _pool_size
    _lock, _openmp, _pool, _pool_size = Lock(), None, None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _run_on_pool(worker: Callable[[], None], threads: int) -> None:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < threads - 1:
            _pool, _pool_size = ThreadPoolExecutor(threads - 1, thread_name_prefix="agglo"), threads - 1
        futures = [_pool.submit(worker) for _ in range(threads - 1)]
    worker()
    for future in futures:
        future.result()


def run(task: Callable[..., object], parts: int, *arguments: object) -> None:
    """Call task(part, parts, *arguments) for every part, each on a thread of its own if there are so many."""
    if parts == 1:
        task(0, 1, *arguments)
        return
    numbers = itertools.count()
    errors: list[BaseException] = []

    def worker(_: object = None) -> None:
        # OpenMP may give fewer threads than asked for, so parts are taken, not assigned.
        while (part := next(numbers)) < parts:
            try:
                task(part, parts, *arguments)
            except BaseException as error:  # it cannot pass through the C frames of OpenMP
                errors.append(error)

    if _openmp is not None:
        _openmp.GOMP_parallel(_Body(worker), None, parts, 0)
    else:
        _run_on_pool(worker, parts)
    if errors:
        raise errors[0]
