"""The CPU backend: Numba kernels on a pool of threads.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`).

Read `keys` (distances as integers, and what rounding may not decide), then the ways to merge: `pairs` (one merge after
another) and `rounds` (1024 tokens and more), `cuts` (from merges to labels), then `chains` (where the others are in
doubt, and trees). Each is compiled when it is first needed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.jit import inner, kernel
from agglo.clustering.linkage.cpu import chains, pairs, rounds
from agglo.clustering.linkage.cpu.keys import FAR, encode

_LARGE = 1024  # tokens from which rounds are faster than pairs, and threads share an image
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly
# Squares within these sum up without overflow, and without losing digits to subnormal numbers.
_LEAST, _MOST = np.float32(1e-25), np.float32(1e25)
_NUMBERS_PER_PART = 300_000  # for fewer, waking a thread takes longer than the work


# For kernels that release the GIL, safe for many callers at once and after a fork. Numba's threading layers are
# neither: workqueue aborts the process when two Python threads call, OpenMP after a fork.
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


@partial(inner, fastmath={"reassoc", "contract"})  # sums in any order, which lets them use vector instructions
def square_sum(row):
    total = np.float32(0)
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    return total


@kernel
def write_units(part, parts, rows, units):
    """Write rows (R, D), scaled to length 1, into units; zero, infinite and NaN rows become NaN."""
    n = rows.shape[0]
    for r in range(part * n // parts, (part + 1) * n // parts):
        row, unit = rows[r], units[r]
        squares = square_sum(row)
        if _LEAST < squares < _MOST:
            shrink = np.float32(1 / np.sqrt(np.float64(squares)))
            for c in range(row.shape[0]):
                unit[c] = row[c] * shrink
        else:
            total = np.float64(0)
            for c in range(row.shape[0]):
                total += np.float64(row[c]) * np.float64(row[c])
            for c in range(row.shape[0]):
                unit[c] = np.float32(np.float64(row[c]) / np.sqrt(total))


def unit_rows(features: Tensor) -> Tensor:
    """Scale float32 features (B, N, D) to length 1, every token."""
    rows = features.reshape(-1, features.shape[-1]).contiguous()
    units = torch.empty_like(rows)
    parts = max(1, min(torch.get_num_threads(), rows.numel() // _NUMBERS_PER_PART))
    run(write_units, parts, rows.numpy(), units.numpy())
    return units.view(features.shape)


def record_in_rounds(distances: np.ndarray, target: int, limit: np.int32, average: bool, parts: int, work: Any) -> int:
    """Record merges of a matrix (N, N) until `target` are certain, the rows of every round spread over threads.

    Returns the merges recorded. They may be too few: work.in_doubt then says that `chains` must go on from there.
    """
    n = len(distances)
    work.first[:], work.size[:], work.depth[:], work.deepest[:], work.left[:] = np.arange(n), 1, 0, 0, FAR
    matrix, odd, recorded = distances.view(np.int32), False, 0
    run(rounds.find_nearest, parts, matrix, work)
    last = rounds.join_parts(n, parts, work) < 0  # the bits of negative distances are no keys
    work.in_doubt[0] = last
    while not last:
        checked, before = average and work.deepest[0] > 0, recorded
        m, n_joined, recorded = rounds.plan_round(len(matrix), limit, recorded, work)
        out = (work.odd if odd else work.even)[: m * m].reshape(m, m)
        run(rounds.write_round, parts, matrix, out, n_joined, average, checked, work)
        recorded, last = rounds.after_round(m, parts, n_joined, checked, before, recorded, target, limit, work)
        matrix, odd = out, not odd
    return recorded


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `operators`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    limit = FAR if threshold is None else encode(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = torch.get_num_threads()
    in_rounds = n >= _LARGE and not single
    parts = threads if in_rounds and batch < threads else 1
    at_once = 1 if in_rounds else max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work: Any = rounds.workspace(n, parts) if in_rounds else pairs.workspace(n)
        while (b := next(chunks)) < batch:
            end = min(b + at_once, batch)
            if single:
                pairs.label_by_spanning_tree(matrices, counts, limit, result, b, end, work)
                continue
            while b < end:
                if in_rounds:
                    recorded = record_in_rounds(matrices[b], n - counts[b], limit, average, parts, work)
                    b += rounds.label_after_rounds(recorded, n - counts[b], limit, average, result[b], work)
                else:
                    b, recorded = pairs.label_by_pairs(matrices, counts, limit, average, result, b, end, work)
                if b < end:
                    exact = chains.workspace(work.merges)
                    recorded = chains.finish_by_chains(matrices[b], recorded, limit, average, exact)
                    chains.label_after_chains(recorded, n - counts[b], result[b], exact)
                    b += 1

    run(label_chunks, 1 if parts > 1 else max(1, min(threads, -(-batch // at_once))))
    return torch.from_numpy(result)


def tree(distances: Tensor, linkage: str) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N), float64, in SciPy's layout."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    single, average = linkage == "single", linkage == "average"
    rows = np.empty((batch, n - 1, 4))
    images = itertools.count()

    def grow(_part: int, _parts: int) -> None:
        in_rounds = n >= _LARGE and not single
        work: Any = rounds.workspace(n, 1) if in_rounds else pairs.workspace(n)
        one, labels = np.ones(batch, np.int64), np.empty((batch, n), np.int64)
        while (b := next(images)) < batch:
            recorded = n - 1
            if single:
                pairs.label_by_spanning_tree(matrices, one, FAR, labels, b, b + 1, work)
            elif in_rounds:
                recorded = record_in_rounds(matrices[b], n - 1, FAR, average, 1, work)
            else:
                _, recorded = pairs.label_by_pairs(matrices, one, FAR, average, labels, b, b + 1, work)
            exact: Any = chains.workspace(work.merges)
            recorded = chains.finish_by_chains(matrices[b], recorded, FAR, average, exact)
            order = np.lexsort((exact.merges[2, :recorded], exact.merges[1, :recorded], exact.heights[:recorded]))
            chains.tree_rows(order, exact.heights, rows[b], exact)

    run(grow, max(1, min(torch.get_num_threads(), batch)))
    return torch.from_numpy(rows)
