"""The CPU backend: Numba kernels on a pool of threads.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`).

Read `keys` (distances as integers, and what rounding may not decide), then the ways to merge: `pairs` (one merge after
another) and `rounds` (1024 tokens and more), then `chains` (where the others are in doubt; labels and trees).
"""

from __future__ import annotations

import itertools
import os
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.jit import inner, kernel
from agglo.clustering.linkage.cpu.chains import finish_by_chains, number_groups, tree_rows
from agglo.clustering.linkage.cpu.keys import FAR, PAD, key_of
from agglo.clustering.linkage.cpu.pairs import merge_closest_pairs, spanning_tree
from agglo.clustering.linkage.cpu.rounds import after_round, find_nearest, join_parts, plan_round, write_round

_LARGE = 1024  # tokens from which rounds are faster than pairs, and threads share an image
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly
_APART = 32  # numbers between what two threads write, lest they fight over a cache line
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


def _scratch(n: int, parts: int) -> dict[str, np.ndarray]:
    """Return what threads that share an image of N tokens need; nothing in it is read before it is written."""

    def ints(*shape: int) -> np.ndarray:
        return np.empty(shape, np.int32)

    lines = n + 2 * PAD  # at least `padded(n)`
    return dict(
        square=ints(n * lines),  # the symmetric matrix, when pairs merge one at a time; else the matrix after a round
        other=ints(n * n),  # the matrix after every other round
        nearest=ints(parts, lines + _APART),  # key of each group's nearest neighbour, as far as this part saw
        neighbour=ints(parts, lines + _APART),  # which group that is
        first=ints(n),  # first token of each group
        size=np.empty(n, np.float32),  # tokens of each group
        kept=np.empty((2, n), np.uint32),  # the one or two old groups that make up each new group
        joined=np.empty((3, n), np.uint32),  # new groups made of two, and the two
        joined_share=np.empty((2, n), np.float32),  # the shares of the two in its size
        lines=ints(parts, 3, n + _APART),  # temporary rows
        merges=ints(3, n),  # key, first token, second token of every merge recorded
        parent=np.empty(n, np.int64),  # a token of the same group, nearer to the group's first
        codes=np.empty(n, np.int64),
        gone=ints(lines),  # FAR for groups merged into another one, otherwise below every key
        in_doubt=np.zeros(1, np.bool_),  # whether `chains` must go on from the merges recorded
        # Average linkage only, see `keys`:
        depth=ints(n),  # roundings each group's keys have gone through, at most
        deepest=np.zeros(1, np.int32),  # the largest of them
        bound=ints(lines),  # keys up to here are too close to a merge of this round
        close=np.zeros(parts, np.int64),  # how many of those a part saw
        left=ints(1),  # the smallest key among pairs that are not merged
        # `chains` only:
        sums=np.empty(n * lines),  # the sum (complete linkage: the maximum) of distances between two groups
        heights=np.empty(n),  # of the merges recorded
        order_keys=np.empty((2, lines), np.int64),
        absent=np.empty(lines, np.int64),  # as `gone`, for 64-bit keys
        counts=np.empty(lines),  # tokens of each group
        members=np.empty((2, n), np.int64),  # the next member of a token's group; the last member of a first one's
    )


Workspace = namedtuple("Workspace", list(_scratch(1, 1)))  # type: ignore[misc]


@kernel
def start(n, work):
    work.deepest[0] = 0
    work.in_doubt[0] = False
    work.left[0] = FAR
    for a in range(n):
        work.depth[a] = 0
        work.first[a] = a
        work.size[a] = 1


@kernel
def record_merges(distances, target, limit, single, average, work):
    """Record merges of one matrix (N, N), one after another, until there are `target`, or all within the limit.

    Returns the merges recorded. They may be too few: work.in_doubt then says that `chains` must go on from there.
    """
    start(distances.shape[0], work)
    if single:
        return spanning_tree(distances, work)
    return merge_closest_pairs(distances, target, limit, average, work)


def record_in_rounds(distances: np.ndarray, target: int, limit: np.int32, average: bool, parts: int, work: Any) -> int:
    """Record merges as `record_merges` until `target` are certain, the rows of every round spread over threads."""
    matrix, odd, recorded = distances.view(np.int32), False, 0
    start(len(matrix), work)
    run(find_nearest, parts, matrix, work)
    last = join_parts(len(matrix), parts, work) < 0  # the bits of negative distances are no keys
    work.in_doubt[0] = last
    while not last:
        checked, before = average and work.deepest[0] > 0, recorded
        m, n_joined, recorded = plan_round(len(matrix), limit, recorded, work)
        out = (work.other if odd else work.square)[: m * m].reshape(m, m)
        run(write_round, parts, matrix, out, n_joined, average, checked, work)
        recorded, last = after_round(m, parts, n_joined, checked, before, recorded, target, limit, work)
        matrix, odd = out, not odd
    return recorded


@kernel
def label_images(distances, k, limit, single, average, labels, work):
    """Write the labels (B, N) of distances (B, N, N), for k (B,) groups or all merges within the limit."""
    batch, n, _ = distances.shape
    for b in range(batch):
        target = n - k[b]
        recorded = record_merges(distances[b], target, limit, single, average, work)
        number_groups(distances[b], recorded, target, limit, average, labels[b], work)


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `operators`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = torch.get_num_threads()
    in_rounds = n >= _LARGE and not single
    parts = threads if in_rounds and batch < threads else 1
    at_once = max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work = Workspace(**_scratch(n, parts))
        while (b := next(chunks)) < batch:
            here = slice(b, b + at_once)
            if in_rounds:
                target = n - counts[b]
                recorded = record_in_rounds(matrices[b], target, limit, average, parts, work)
                number_groups(matrices[b], recorded, target, limit, average, result[b], work)
            else:
                label_images(matrices[here], counts[here], limit, single, average, result[here], work)

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
        work: Any = Workspace(**_scratch(n, 1))
        while (b := next(images)) < batch:
            if n >= _LARGE and not single:
                recorded = record_in_rounds(matrices[b], n - 1, FAR, average, 1, work)
            else:
                recorded = record_merges(matrices[b], n - 1, FAR, single, average, work)
            recorded = finish_by_chains(matrices[b], recorded, FAR, average, work)
            order = np.lexsort((work.merges[2, :recorded], work.merges[1, :recorded], work.heights[:recorded]))
            tree_rows(order, work.heights, rows[b], work)

    run(grow, max(1, min(torch.get_num_threads(), batch)))
    return torch.from_numpy(rows)
