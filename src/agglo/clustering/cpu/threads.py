"""Threads for kernels that release the GIL, safe for many callers at once and after a fork.

Numba's threading layers are neither: workqueue aborts the process when two Python threads call, OpenMP after a fork.

Where torch brings GNU OpenMP (its Linux builds), parts run on the very threads torch computes on. Those spin for
milliseconds after every torch operation, waiting for the next; other threads would have to share the cores with them.
Elsewhere, in forked processes (OpenMP's threads do not survive a fork, and it waits for them forever), and with
AGGLO_OPENMP=0 in the environment, parts run on a thread pool of our own.

Other processes on the same cores (workers of a data loader, say) turn threads into a loss: OpenMP returns only after
every thread has run, and one that waits for a core holds up all others for some milliseconds, many times the work. So
`run` compares the time a call took with the processor time of its parts, which is what one thread alone would have
taken. Where threads brought nothing twice in a row, the following calls use half as many, down to one; after a while,
longer each time it fails, one call tries twice as many again.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch

VARIABLE = "AGGLO_OPENMP"
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, if it is GNU's and not declined."""
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={wanted!r} is not known; accepted: '0' (a thread pool), '1' (OpenMP if possible)")
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if wanted == "0" or len(libraries) != 1:
        return None
    try:
        library = ctypes.CDLL(str(libraries[0]), mode=os.RTLD_NOLOAD)  # never a second copy, with threads of its own
        library.GOMP_parallel.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (OSError, AttributeError):
        return None
    return library


class Pace:
    """How many of torch's threads are worth using now. Races between callers cost a late decision, nothing else."""

    _PAID = 0.9  # of the processor time: above, the threads gained nothing worth having
    _TOO_SHORT = 1e-4  # seconds of processor time: below, nothing can be told
    _PATIENCE = 2  # losses in a row: one may be chance
    _FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds; a failed attempt then costs less than one call in a hundred

    def __init__(self) -> None:
        self.halvings = 0
        self._losses = 0
        self._pause, self._until = self._FIRST_PAUSE, 0.0

    def threads(self, most: int, now: float) -> int:
        halvings = self.halvings  # read once: another caller may change it meanwhile
        return max(1, most >> (halvings - (halvings > 0 and now >= self._until)))

    def note(self, threads: int, most: int, elapsed: float, processor_time: float, now: float) -> None:
        """Learn from a call on so many threads."""
        if processor_time < self._TOO_SHORT:
            return
        paid = elapsed < self._PAID * processor_time
        # More threads than the halvings allow is an attempt, unless there are none: then torch has fewer threads than
        # when the call began.
        is_attempt = self.halvings > 0 and threads > max(1, most >> self.halvings)
        if is_attempt and paid:
            self.halvings = max(0, self.halvings - 1)  # two callers may both have found one to take back
            self._pause, self._until = self._FIRST_PAUSE, now
        elif is_attempt:
            self._pause = min(2 * self._pause, self._LONGEST_PAUSE)
            self._until = now + self._pause
        else:
            self._losses = 0 if paid else self._losses + 1
            if self._losses == self._PATIENCE:
                self._losses = 0
                self.halvings += 1
                self._until = now + self._pause


_lock = Lock()
_openmp = _find_openmp()
_pace = Pace()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    """Threads do not survive a fork, and the lock may have been held during it."""
    global _lock, _openmp, _pace, _pool, _pool_size
    _lock, _openmp, _pace, _pool, _pool_size = Lock(), None, Pace(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def available() -> int:
    """How many threads a call should spread its work over: torch's number, or fewer while the cores are shared."""
    return _pace.threads(torch.get_num_threads(), time.monotonic())


def _run_on_pool(worker: Callable[[], None], threads: int) -> None:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < threads - 1:
            _pool, _pool_size = ThreadPoolExecutor(threads - 1, thread_name_prefix="agglo"), threads - 1
        futures = [_pool.submit(worker) for _ in range(threads - 1)]
    worker()
    for future in futures:
        if not future.cancel():  # a thread that has not begun would find nothing left to do
            future.result()


def run(task: Callable[..., object], parts: int, *arguments: object) -> None:
    """Call task(part, parts, *arguments) for every part, each on a thread of its own if there are so many."""
    if parts == 1:
        task(0, 1, *arguments)
        return
    numbers = itertools.count()
    errors: list[BaseException] = []
    processor_times: list[float] = []

    def worker(_: object = None) -> None:
        # OpenMP may give fewer threads than asked for, so parts are taken, not assigned.
        begin = time.thread_time()
        while (part := next(numbers)) < parts:
            try:
                task(part, parts, *arguments)
            except BaseException as error:  # it cannot pass through the C frames of OpenMP
                errors.append(error)
        processor_times.append(time.thread_time() - begin)

    begin = time.monotonic()
    if _openmp is not None:
        _openmp.GOMP_parallel(_Body(worker), None, parts, 0)
    else:
        _run_on_pool(worker, parts)
    end = time.monotonic()
    _pace.note(parts, torch.get_num_threads(), end - begin, sum(processor_times), end)
    if errors:
        raise errors[0]
