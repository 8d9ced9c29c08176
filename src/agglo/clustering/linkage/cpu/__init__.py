"""The CPU backend: Numba kernels on a pool of threads.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`).

Read `keys` (distances as integers, and what rounding may not decide), then the ways to merge: `pairs` (one merge after
another) and `rounds` (1024 tokens and more), `cuts` (from merges to labels), then `chains` (where the others are in
doubt, and trees). Each is compiled when it is first needed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances.cpu import CosineDistances
from agglo.clustering.distances.cpu import workspace as distance_workspace
from agglo.clustering.kernels import run
from agglo.clustering.linkage.cpu import chains, pairs, rounds
from agglo.clustering.linkage.cpu.keys import FAR, encode

_LARGE = 1024  # tokens from which rounds are faster than pairs, and threads share an image
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly
_KEPT = 32  # arrays that a thread keeps, none of them of _LARGE tokens
T = TypeVar("T")


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


def labels(distances: Tensor | CosineDistances, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N), which may be made image by image; see `operators`."""
    limit = FAR if threshold is None else encode(np.float32(threshold))
    counts = np.ones(distances.shape[0], np.int64) if k is None else k.numpy()
    return torch.from_numpy(find_labels(distances, linkage, counts, limit))


def find_labels(distances: Tensor | CosineDistances, linkage: str, counts: np.ndarray, limit: np.int32) -> np.ndarray:
    """Labels (B, N) for counts (B,) of groups, or all merges within the limit where that leaves more."""
    batch, n, _ = distances.shape
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = torch.get_num_threads()
    in_rounds = n >= _LARGE and not single
    parts = threads if in_rounds and batch < threads else 1
    if not isinstance(distances, Tensor) and (parts > 1 or n >= _LARGE):
        distances = distances.matrices()
    made = None if isinstance(distances, Tensor) else distances
    given = distances.numpy() if isinstance(distances, Tensor) else None
    at_once = 1 if in_rounds else max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work: Any = rounds.workspace(n, parts) if in_rounds else _kept(pairs.workspace, n)
        if made is not None:
            buffer, own = _kept(_matrices, at_once, n), _kept(distance_workspace, n, made.width)
        while (first := next(chunks)) < batch:
            end = min(first + at_once, batch)
            if made is not None:
                made.write(first, end, buffer, own)
            matrices = buffer if given is None else given[first:end]
            ks, out, b, last = counts[first:end], result[first:end], 0, end - first
            if single:
                pairs.label_by_spanning_tree(matrices, ks, limit, out, b, last, work)
                continue
            while b < last:
                if in_rounds:
                    recorded = record_in_rounds(matrices[b], n - ks[b], limit, average, parts, work)
                    b += rounds.label_after_rounds(recorded, n - ks[b], limit, average, out[b], work)
                else:
                    b, recorded = pairs.label_by_pairs(matrices, ks, limit, average, out, b, last, work)
                if b < last:
                    exact = chains.workspace(work.merges)
                    recorded = chains.finish_by_chains(matrices[b], recorded, limit, average, exact)
                    chains.label_after_chains(recorded, n - ks[b], out[b], exact)
                    b += 1

    run(label_chunks, 1 if parts > 1 else max(1, min(threads, -(-batch // at_once))))
    return result


_local = threading.local()


def _kept(make: Callable[..., T], *sizes: int) -> T:
    """Return make(*sizes), the one that this thread made before if there is one: at one image it is the larger cost."""
    kept: dict[Any, Any] = _local.__dict__.setdefault("kept", {})
    if (make, sizes) not in kept:
        if len(kept) >= _KEPT:
            kept.clear()
        kept[make, sizes] = make(*sizes)
    return cast(T, kept[make, sizes])


def _matrices(batch: int, n: int) -> np.ndarray:
    return np.empty((batch, n, n), np.float32)


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
