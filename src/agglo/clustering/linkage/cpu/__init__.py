"""The CPU backend: Numba kernels on a pool of threads.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`).

What to read: `clustering/keys.py` (distances as integers), then four ways to merge, none of which is best everywhere:
`pairs` (few tokens), `rounds` (many), `spanning` (single linkage) and `chains` (exact numbers, where the others are in
doubt); `certainty` (what rounding may not decide) and `merges` (which way when, labels and trees).
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances import weighted
from agglo.clustering.keys import FAR, key_of
from agglo.clustering.linkage.cpu.chains import finish_by_chains
from agglo.clustering.linkage.cpu.merges import (
    label_images,
    number_groups,
    pairs_are_cheaper,
    record_merges,
    tree_rows,
    write_heights,
)
from agglo.clustering.linkage.cpu.rounds import merge_on_threads
from agglo.clustering.linkage.cpu.workspace import workspace
from agglo.clustering.rows import inspect
from agglo.clustering.threads import run

__all__ = ["inspect", "labels", "tree"]

_LARGE = 1024  # tokens from which threads share an image; below, handing out rows costs more than it saves
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly


def labels(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None, weights: Tensor | None = None
) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = (distances if weights is None else weighted(distances, weights)).numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = torch.get_num_threads()

    if batch < threads and n >= _LARGE:
        work = workspace(n, threads)
        for b in range(batch):
            target = n - int(counts[b])
            if single or pairs_are_cheaper(n, target, threads):
                recorded = record_merges(matrices[b], target, limit, single, average, work)
            else:
                recorded = merge_on_threads(matrices[b], target, limit, average, threads, work)
            number_groups(matrices[b], recorded, target, limit, average, result[b], work)
        return torch.from_numpy(result)

    at_once = max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work = workspace(n)
        while (begin := next(chunks)) < batch:
            here = slice(begin, begin + at_once)
            label_images(matrices[here], counts[here], limit, single, average, result[here], work)

    run(label_chunks, max(1, min(threads, -(-batch // at_once))))
    return torch.from_numpy(result)


def tree(distances: Tensor, linkage: str, weights: Tensor | None = None) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N); see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = (distances if weights is None else weighted(distances, weights)).numpy()
    single, average = linkage == "single", linkage == "average"
    rows = np.empty((batch, n - 1, 4))
    images = itertools.count()

    def grow(_part: int, _parts: int) -> None:
        work = workspace(n)
        while (b := next(images)) < batch:
            recorded = record_merges(matrices[b], n - 1, FAR, single, average, work)
            if average or work.in_doubt[0]:
                recorded = finish_by_chains(matrices[b], recorded, FAR, average, work)
            else:
                write_heights(recorded, work)
            order = np.lexsort((work.merges[2, :recorded], work.merges[1, :recorded], work.heights[:recorded]))
            tree_rows(order, work.heights, rows[b], work)

    run(grow, max(1, min(torch.get_num_threads(), batch)))
    return torch.from_numpy(rows)
