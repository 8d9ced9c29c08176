"""The CPU backend: Numba kernels on threads of our own.

A batch is spread over the threads image by image. A few large images are instead worked on by all threads together, row
by row. The number of threads is torch's (`torch.set_num_threads`), or fewer while other processes take the cores.

What to read: `keys` (distances as integers), then `rounds`, `one_at_a_time` and `spanning` (three ways to merge), then
`image` (which of them when) and `large` (the same for large images, in little memory), `certainty` and `exact_average`
(what rounding may not decide), `labels_and_trees`. Weights come before all of it, in `weighting`. Tokens on a grid have
a file of their own, `grid`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.cpu.cosine import become_distances
from agglo.clustering.cpu.exact_average import finish_exactly
from agglo.clustering.cpu.image import record_merges
from agglo.clustering.cpu.inspection import measure_asymmetry, weigh_rows
from agglo.clustering.cpu.keys import FAR, key_of
from agglo.clustering.cpu.labels_and_trees import (
    label_images,
    number_certainly,
    number_exactly,
    number_groups,
    tree_rows,
    write_heights,
)
from agglo.clustering.cpu.large import merge_large
from agglo.clustering.cpu.spanning import compare_halves
from agglo.clustering.cpu.threads import available, run
from agglo.clustering.cpu.weighting import become_weighted_distances, write_weighted
from agglo.clustering.cpu.workspace import PAD, Workspace, padded, workspace
from agglo.clustering.distances import pairwise, products

Inspection = tuple[Tensor, Tensor, Tensor]

_LARGE = 1024  # tokens from which threads share an image; below, handing out rows costs more than it saves
_FEW = 4  # images per thread up to which scratch memory of half a matrix per thread counts, beside one for every image
_DISTANCES_AT_ONCE = 320_000  # how many a thread takes in turn: enough to be worth a call, few enough to share fairly
_ROUNDING = 3e-5  # of the largest distance: what sums over a symmetric matrix may differ by, ten times over


def labels(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None, weights: Tensor | None = None
) -> Tensor:
    """Labels (B, N) of distances (B, N, N); see `dispatch`."""
    return _labels(distances, linkage, k, threshold, weights, None)


def labels_of_features(
    features: Tensor,
    metric: str,
    linkage: str,
    k: Tensor | None,
    threshold: float | None,
    weights: Tensor | None = None,
) -> Tensor:
    """`labels` of the distances between the tokens of features (B, N, D). A few large images are clustered in the
    memory of their distances, which are all measured again should one of them need exact sums."""
    are_products = metric == "cosine"

    def measure() -> Tensor:
        return products(features) if are_products else pairwise(features, metric)

    batch, n, _ = features.shape
    if linkage == "single" or n < _LARGE or batch > _FEW * available():
        return _labels(measure(), linkage, k, threshold, weights, None, are_products)
    return _labels_within(measure, are_products, linkage == "average", k, threshold, weights)


def labels_and_inspection(
    distances: Tensor, linkage: str, k: Tensor | None, threshold: float | None, weights: Tensor | None = None
) -> tuple[Tensor, Inspection | None]:
    """`labels` and `inspect` in one go, an image being inspected just before it is clustered, while it is in cache."""
    batch, n, _ = distances.shape
    differences = np.zeros((available(), batch, n))
    return _labels(distances, linkage, k, threshold, weights, differences), _judge(distances.numpy(), differences)


def _clusterable(
    given: np.ndarray, weights: np.ndarray | None, are_products: bool, apart: np.ndarray | None, parts: int = 1
) -> np.ndarray:
    """The distances (B, N, N) to cluster. Products are written over, an image's just before it is clustered, while it
    is in cache; distances go into the first items of `apart` if there are weights (B, N) to multiply with."""
    if are_products and weights is not None:
        run(become_weighted_distances, parts, given, weights)
    elif are_products:
        run(become_distances, parts, given)
    elif weights is not None:
        assert apart is not None
        run(write_weighted, parts, given, weights, apart)
        return apart[: len(given)]
    return given


def _labels(
    distances: Tensor,
    linkage: str,
    k: Tensor | None,
    threshold: float | None,
    weights: Tensor | None,
    differences: np.ndarray | None,
    are_products: bool = False,
) -> Tensor:
    """Labels (B, N), with the images weighed into differences (parts, B, N) if given."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    per_token = None if weights is None else weights.contiguous().numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    single, average = linkage == "single", linkage == "average"
    result = np.empty((batch, n), np.int64)
    threads = available()

    def scratch(images: int) -> np.ndarray | None:
        return None if per_token is None or are_products else np.empty((images, n, n), np.float32)

    if batch < threads and n >= _LARGE:
        if differences is not None:
            _weigh(matrices, differences)
        matrices = _clusterable(matrices, per_token, are_products, scratch(batch), threads)
        for b in range(batch):
            if single:
                work = workspace(n, threads)
                run(compare_halves, threads, matrices[b].view(np.int32), work)
                here = slice(b, b + 1)
                label_images(matrices[here], counts[here], limit, True, False, True, result[here], work)
            else:
                target = n - int(counts[b])
                recorded, work = merge_large(matrices[b], target, limit, average, threads, write_over=False)
                number_groups(matrices[b], recorded, target, limit, average, result[b], work)
        return torch.from_numpy(result)

    at_once = max(1, min(-(-batch // threads), _DISTANCES_AT_ONCE // n**2))
    chunks = itertools.count(0, at_once)

    def label_chunks(_part: int, _parts: int) -> None:
        work = workspace(n)
        stripe = np.empty((1, n), np.float32)
        apart = scratch(at_once)
        while (begin := next(chunks)) < batch:
            here = slice(begin, min(begin + at_once, batch))
            if differences is not None:
                weigh_rows(0, 1, matrices[here], _random_weights(n), stripe, differences[:1, here])
            own_weights = None if per_token is None else per_token[here]
            images = _clusterable(matrices[here], own_weights, are_products, apart)
            label_images(images, counts[here], limit, single, average, False, result[here], work)

    run(label_chunks, max(1, min(threads, -(-batch // at_once))))
    return torch.from_numpy(result)


def _labels_within(
    measure: Callable[[], Tensor],
    are_products: bool,
    average: bool,
    k: Tensor | None,
    threshold: float | None,
    weights: Tensor | None,
) -> Tensor:
    """Labels (B, N) of large images by average or complete linkage, each in the memory of its distances or products
    (B, N, N), which every call of `measure` makes anew."""
    matrices = measure().numpy()
    batch, n, _ = matrices.shape
    per_token = None if weights is None else weights.contiguous().numpy()
    limit = FAR if threshold is None else key_of(np.float32(threshold))
    counts = np.ones(batch, np.int64) if k is None else k.numpy()
    result = np.empty((batch, n), np.int64)
    threads = available()
    in_doubt: dict[int, tuple[int, Workspace]] = {}

    def distances_of(b: int, parts: int) -> np.ndarray:
        here = slice(b, b + 1)
        own_weights = None if per_token is None else per_token[here]
        return _clusterable(matrices[here], own_weights, are_products, matrices[here], parts)[0]

    def label(b: int, parts: int) -> None:
        target = n - int(counts[b])
        recorded, work = merge_large(distances_of(b, parts), target, limit, average, parts, write_over=True)
        if not number_certainly(recorded, target, limit, average, result[b], work):
            in_doubt[b] = recorded, work

    def label_exactly(b: int, parts: int) -> None:
        recorded, work = in_doubt[b]
        left = n - recorded
        work = work._replace(sums=np.empty(left * padded(left)))
        number_exactly(distances_of(b, parts), recorded, n - int(counts[b]), limit, result[b], work)

    def for_each(images: list[int], do: Callable[[int, int], None]) -> None:
        if batch < threads:
            for b in images:
                do(b, threads)
            return
        places = itertools.count()

        def take(_part: int, _parts: int) -> None:
            while (place := next(places)) < len(images):
                do(images[place], 1)

        run(take, min(threads, len(images)))

    for_each([b for b in range(batch) if counts[b] < n], label)
    result[counts >= n] = np.arange(n)
    if in_doubt:
        del matrices  # before the next are made
        matrices = measure().numpy()
        for_each(sorted(in_doubt), label_exactly)
    return torch.from_numpy(result)


def tree(distances: Tensor, linkage: str, weights: Tensor | None = None) -> Tensor:
    """Linkage matrices (B, N-1, 4) of distances (B, N, N); see `dispatch`."""
    batch, n, _ = distances.shape
    matrices = distances.numpy()
    per_token = None if weights is None else weights.contiguous().numpy()
    single, average = linkage == "single", linkage == "average"
    rows = np.empty((batch, n - 1, 4))
    threads = available()
    images = itertools.count()

    def grow(_part: int, _parts: int) -> None:
        work = workspace(n)
        apart = None if per_token is None else np.empty((1, n, n), np.float32)
        while (b := next(images)) < batch:
            own_weights = None if per_token is None else per_token[b : b + 1]
            matrix = _clusterable(matrices[b : b + 1], own_weights, False, apart)[0]
            recorded = record_merges(matrix, n - 1, FAR, single, average, False, work)
            if average:
                recorded = finish_exactly(matrix, recorded, FAR, work)
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
