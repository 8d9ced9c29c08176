"""Threads of our own for kernels that release the GIL.

Numba's threading layers abort the process when two Python threads call at once (workqueue) or after a fork (OpenMP).
A plain thread pool does neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    """Threads do not survive a fork, and the lock may have been held during it."""
    global _lock, _pool, _pool_size
    _lock, _pool, _pool_size = Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def run(task: Callable[..., object], parts: int, *arguments: object) -> None:
    """Call task(part, parts, *arguments) for every part, the first here and the others on the pool; wait for all."""
    global _pool, _pool_size
    if parts == 1:
        task(0, 1, *arguments)
        return
    with _lock:
        if _pool is None or _pool_size < parts - 1:
            _pool, _pool_size = ThreadPoolExecutor(parts - 1, thread_name_prefix="agglo"), parts - 1
        futures = [_pool.submit(task, part, parts, *arguments) for part in range(1, parts)]
    try:
        task(0, parts, *arguments)
    finally:
        for future in futures:
            future.result()
