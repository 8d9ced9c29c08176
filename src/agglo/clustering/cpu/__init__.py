"""The CPU backend: Numba kernels on threads of our own.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`), or fewer while other processes take the cores.

What to read: `keys` (distances as integers), then `rounds`, `one_at_a_time` and `spanning` (three ways to merge), then
`image` (which of them when), `certainty` and `exact_average` (what rounding may not decide), `labels_and_trees`. Tokens
on a grid have a file of their own, `grid`.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.cpu.cosine import become_distances
from agglo.clustering.cpu.exact_average import finish_exactly
from agglo.clustering.cpu.image import finish, pairs_are_cheaper, record_merges, rounds_pay
from agglo.clustering.cpu.inspection import measure_asymmetry, weigh_rows
from agglo.clustering.cpu.keys import FAR, any_negative, encode, key_of
from agglo.clustering.cpu.labels_and_trees import label_images, number_groups, tree_rows, write_heights
from agglo.clustering.cpu.rounds import certain_merges, find_nearest, join_parts, lay_out_rows, plan_round, write_round
from agglo.clustering.cpu.spanning import compare_halves
from agglo.clustering.cpu.threads import available, run
from agglo.clustering.cpu.workspace import PAD, Workspace, padded, start, workspace

Inspection = tuple[Tensor, Tensor, Tensor]

_TOGETHER_FROM = 1024  # tokens; below, handing rows to threads costs more than it saves
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly
_ROUNDING = 3e-5  # of the largest distance: what sums over a symmetric matrix may differ by, ten times over


def _merge_together(
    distances: np.ndarray, target: int, limit: np.int32, average: bool, parts: int
) -> tuple[int, Workspace]:
    """`merge_image` of one large image with the rows of every round spread over the threads."""
    n = distances.shape[0]
    work = workspace(n, parts)
    keys = distances.view(np.int32)
    start(n, work)
    if any_negative(keys):
        if average:
            work.in_doubt[0] = True
            return 0, work
        encode(distances, work.encoded)
        work.is_encoded[0] = True
        keys = work.encoded
    flat, row, side = keys.reshape(-1), work.row[0], 1
    certain = recorded = 0
    pays = not pairs_are_cheaper(n, target, parts)
    if pays:
        run(find_nearest, parts, keys, work)
        join_parts(n, parts, work)
    while pays:
        before, checked = recorded, average and work.deepest[0] > 0
        m, n_joined, recorded = plan_round(n, limit, recorded, work)
        out, out_row = work.packed[side], work.row[side]
        lay_out_rows(m, out_row)
        run(write_round, parts, flat, row, n, m, n_joined, average, checked, out, out_row, work)
        if checked and work.close.sum() != n_joined:
            work.in_doubt[0] = True
            return before, work
        join_parts(m, parts, work)
        flat, row, side, n = out, out_row, 1 - side, m
        certain, smallest = certain_merges(n, recorded, work)
        if certain >= target or smallest > limit or n == 1:
            work.left[0] = smallest
            return recorded, work
        pays = rounds_pay(n, n_joined) and not pairs_are_cheaper(n, target - certain, parts)
    return finish(flat, row, n, target, certain, limit, average, recorded, work), work


def labels(distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `dispatch`."""
    return _labels(distances, linkage, k, threshold, None)


def labels_by_cosine(products: Tensor, linkage: str, k: Tensor | None, threshold: float | None) -> Tensor:
    """`labels` of the cosine distances that belong to products (B, N, N) of unit vectors, which are written over: an
    image's just before it is clustered, while it is in cache."""
    return _labels(products, linkage, k, threshold, None, are_products=True)


def labels_and_inspection(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None
) -> tuple[Tensor, Inspection | None]:
    """`labels` and `inspect` in one go, an image being inspected just before it is clustered, while it is in cache."""
    batch, n, _ = distances.shape
    differences = np.zeros((available(), batch, n))
    return _labels(distances, linkage, k, threshold, differences), _judge(distances.numpy(), differences)


def _labels(
    distances: Tensor,
    linkage: str,
    k: Tensor | None,
    threshold: float | None,
    differences: np.ndarray | None,
    are_products: bool = False,
) -> Tensor:
    """Labels (B, N), with the images weighed into differences (parts, B, N) if given."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = available()

    if batch < threads and n >= _TOGETHER_FROM:
        if are_products:
            run(become_distances, threads, matrices)
        if differences is not None:
            _weigh(matrices, differences)
        for b in range(batch):
            if single:
                work = workspace(n, threads)
                run(compare_halves, threads, matrices[b].view(np.int32), work)
                label_images(matrices, b, b + 1, counts, limit, True, False, True, result, work)
            else:
                target = n - int(counts[b])
                recorded, work = _merge_together(matrices[b], target, limit, average, threads)
                number_groups(matrices[b], recorded, target, limit, average, result[b], work)
        return torch.from_numpy(result)

    at_once = max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work = workspace(n)
        stripe = np.empty((1, n), np.float32)
        while (begin := next(chunks)) < batch:
            end = min(begin + at_once, batch)
            if are_products:
                become_distances(0, 1, matrices[begin:end])
            if differences is not None:
                weigh_rows(0, 1, matrices[begin:end], _random_weights(n), stripe, differences[:1, begin:end])
            label_images(matrices, begin, end, counts, limit, single, average, False, result, work)

    run(label_chunks, max(1, min(threads, -(-batch // at_once))))
    return torch.from_numpy(result)


def tree(distances: Tensor, linkage: str) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N); see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    single, average = linkage == "single", linkage == "average"
    rows = np.empty((batch, n - 1, 4))
    threads = available()
    images = itertools.count()

    def grow(_part: int, _parts: int) -> None:
        work = workspace(n)
        while (b := next(images)) < batch:
            recorded = record_merges(matrices[b], n - 1, FAR, single, average, False, work)
            if average:
                recorded = finish_exactly(matrices[b], recorded, FAR, work)
            else:
                write_heights(recorded, work)
            order = np.lexsort((work.merges[2, :recorded], work.merges[1, :recorded], work.heights[:recorded]))
            tree_rows(order, work.heights, rows[b], work)

    run(grow, max(1, min(threads, batch)))
    return torch.from_numpy(rows)


@lru_cache(maxsize=64)
def _random_weights(n: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.uniform(0.5, 1.5, n) * generator.choice((-1, 1), n)).astype(np.float32)


def _weigh(matrices: np.ndarray, differences: np.ndarray) -> None:
    parts, _, n = differences.shape
    stripes = np.empty((parts, padded(n) + PAD), np.float32)  # padded, lest two threads fight over a cache line
    run(weigh_rows, parts, matrices, _random_weights(n), stripes, differences)


def inspect(distances: Tensor) -> Inspection | None:
    """Of every item of distances (B, N, N): is it finite, its largest asymmetry, its largest magnitude; each (B,).

    An asymmetry that is within rounding beyond doubt is not measured and given as 0; None if that goes for all items.
    """
    batch, n, _ = distances.shape
    differences = np.zeros((available(), batch, n))
    _weigh(distances.numpy(), differences)
    return _judge(distances.numpy(), differences)


def _judge(matrices: np.ndarray, differences: np.ndarray) -> Inspection | None:
    """What `inspect` returns, from the weighed differences (parts, B, N)."""
    parts, batch, _ = differences.shape
    scale = np.abs(matrices[:, 0]).max(axis=1)
    with np.errstate(invalid="ignore"):
        within_rounding = np.abs(differences.sum(axis=0)).max(axis=1, initial=0) <= _ROUNDING * scale
    within_rounding &= np.isfinite(scale)
    if within_rounding.all():
        return None
    finite, asymmetry = np.ones(batch, np.bool_), np.zeros(batch, np.float32)
    for b in np.flatnonzero(~within_rounding):
        found = np.zeros((parts, 2), np.int32)
        run(measure_asymmetry, parts, matrices[b], found)
        asymmetry[b], scale[b] = found.max(axis=0).view(np.float32)
        finite[b] = np.isfinite(asymmetry[b]) and np.isfinite(scale[b])
    return torch.from_numpy(finite), torch.from_numpy(asymmetry), torch.from_numpy(scale)
