"""The CPU backend: Numba kernels on a pool of threads.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`).

What to read: `clustering/keys.py` (distances as integers), then `rounds`, `pairs`, `spanning` and `chains` (four ways
to merge), `image` (which of them when), `certainty` (what rounding may not decide) and `merges` (labels and trees).
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances import pairwise, products
from agglo.clustering.keys import FAR, key_of
from agglo.clustering.linkage.cpu.chains import finish_by_chains
from agglo.clustering.linkage.cpu.image import merge_on_threads
from agglo.clustering.linkage.cpu.merges import label_images, number_groups, record_merges, tree_rows, write_heights
from agglo.clustering.linkage.cpu.spanning import measure_asymmetry, spanning_tree
from agglo.clustering.linkage.cpu.workspace import workspace
from agglo.clustering.rows import write_distances
from agglo.clustering.threads import run

_LARGE = 1024  # tokens from which threads share an image; below, handing out rows costs more than it saves
_NO_WEIGHTS = np.empty((0, 0), np.float32)
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly


def labels(
    distances: Tensor,
    linkage: str,
    k: Tensor | None,
    threshold: float | None,
    weights: Tensor | None = None,
    *,
    are_products: bool = False,
) -> Tensor:
    """Labels (B, N) of distances (B, N, N), or of products of unit vectors, which are written over; see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    per_token = None if weights is None else weights.contiguous().numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = torch.get_num_threads()

    if batch < threads and n >= _LARGE:
        matrices = _clusterable(matrices, per_token, are_products, threads)
        work = workspace(n, threads)
        for b in range(batch):
            target = n - int(counts[b])
            if single:
                recorded = spanning_tree(matrices[b], work)
            else:
                recorded = merge_on_threads(matrices[b], target, limit, average, threads, work)
            number_groups(matrices[b], recorded, target, limit, average, result[b], work)
        return torch.from_numpy(result)

    at_once = max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work = workspace(n)
        while (begin := next(chunks)) < batch:
            here = slice(begin, min(begin + at_once, batch))
            images = _clusterable(matrices[here], None if per_token is None else per_token[here], are_products)
            label_images(images, counts[here], limit, single, average, result[here], work)

    run(label_chunks, max(1, min(threads, -(-batch // at_once))))
    return torch.from_numpy(result)


def labels_of_features(
    features: Tensor,
    metric: str,
    linkage: str,
    k: Tensor | None,
    threshold: float | None,
    weights: Tensor | None = None,
) -> Tensor:
    """`labels` of the distances between the tokens of features (B, N, D).

    An image's products become distances just before it is clustered, while they are in cache.
    """
    if metric == "cosine":
        return labels(products(features), linkage, k, threshold, weights, are_products=True)
    return labels(pairwise(features, metric), linkage, k, threshold, weights)


def _clusterable(given: np.ndarray, weights: np.ndarray | None, are_products: bool, parts: int = 1) -> np.ndarray:
    """The distances (B, N, N) to cluster: products are written over, distances with weights (B, N) are copied."""
    if weights is None and not are_products:
        return given
    distances = given if are_products else np.empty_like(given)
    run(write_distances, parts, given, _NO_WEIGHTS if weights is None else weights, are_products, distances)
    return distances


def tree(distances: Tensor, linkage: str, weights: Tensor | None = None) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N); see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    per_token = None if weights is None else weights.contiguous().numpy()
    single, average = linkage == "single", linkage == "average"
    rows = np.empty((batch, n - 1, 4))
    images = itertools.count()

    def grow(_part: int, _parts: int) -> None:
        work = workspace(n)
        while (b := next(images)) < batch:
            own_weights = None if per_token is None else per_token[b : b + 1]
            matrix = _clusterable(matrices[b : b + 1], own_weights, False)[0]
            recorded = record_merges(matrix, n - 1, FAR, single, average, work)
            if average or work.in_doubt[0]:
                recorded = finish_by_chains(matrix, recorded, FAR, average, work)
            else:
                write_heights(recorded, work)
            order = np.lexsort((work.merges[2, :recorded], work.merges[1, :recorded], work.heights[:recorded]))
            tree_rows(order, work.heights, rows[b], work)

    run(grow, max(1, min(torch.get_num_threads(), batch)))
    return torch.from_numpy(rows)


def inspect(distances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure every item of distances (B, N, N).

    Returns:
        Whether it is finite, its largest asymmetry and its largest magnitude, each (B,).
    """
    matrices = distances.numpy()
    found = np.empty((len(matrices), 2), np.float32)
    threads = torch.get_num_threads()
    if len(matrices) < threads:
        for b, matrix in enumerate(matrices):
            found[b] = _asymmetry(matrix, threads)
    else:
        images = itertools.count()

        def measure(_part: int, _parts: int) -> None:
            while (b := next(images)) < len(matrices):
                found[b] = _asymmetry(matrices[b], 1)

        run(measure, threads)
    asymmetry, scale = torch.from_numpy(found).unbind(1)
    return asymmetry.isfinite() & scale.isfinite(), asymmetry, scale


def _asymmetry(matrix: np.ndarray, parts: int) -> np.ndarray:
    """The largest asymmetry and magnitude of one (N, N) matrix."""
    found = np.empty((parts, 2), np.int32)
    run(measure_asymmetry, parts, matrix, found)
    largest: np.ndarray = found.max(axis=0).view(np.float32)
    return largest
