"""Every backend, on every way through it, gives what the definition asks for: SciPy's partition where nothing ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agglo
from agglo.clustering import cut
from agglo.clustering.distances import pairwise
from agglo.clustering.linkage import reference
from agglo.utils.devices import torch_threads
from tests.support.clusters import (
    BACKENDS,
    FAST_BACKENDS,
    LINKAGES,
    assert_every_merge_is_a_minimum,
    by_first_member,
    distinct_distances,
    scipy_tree,
    symmetric,
    tokens,
)

linkages, seeds = st.sampled_from(LINKAGES), st.integers(0, 2**16)


def some_weights(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """Between 0.01 and 100, about 1 in the middle."""
    return 100 ** (2 * torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) - 1)


def integers(batch: int, n: int, low: int, high: int, seed: int) -> torch.Tensor:
    """Distances with ties everywhere."""
    values = torch.randint(low, high, (batch, n, n), generator=torch.Generator().manual_seed(seed))
    return symmetric(values.float())


def untied(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """Distances of which no two are equal, nor any two means of them but by chance."""
    jitter = torch.rand(batch, n, n, generator=torch.Generator().manual_seed(seed))
    return symmetric(distinct_distances(batch, n, seed) + jitter / (2 * n * n))


def explicit(distances: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The weighted distances."""
    return distances if weights is None else distances * torch.maximum(weights[:, :, None], weights[:, None])


def scipy_labels(tree: np.ndarray, k: int) -> np.ndarray:
    """The first N - k merges of SciPy's tree."""
    group = np.arange(len(tree) + 1)
    for row in range(len(group) - k):
        group[np.isin(group, tree[row, :2].astype(int))] = len(group) + row
    return by_first_member(group)


@st.composite
def small_problems(draw):
    """Distances (2, N, N) of every kind, and weights or None."""
    n, seed = draw(st.integers(1, 20)), draw(seeds)
    bounds = draw(st.sampled_from([None, (0, 1), (0, 2), (1, 4), (-3, 3), (0, 10)]))
    distances = distinct_distances(2, n, seed) if bounds is None else integers(2, n, *bounds, seed)
    levels = draw(st.sampled_from([None, [0.0], [0.0, 1.0], [0.0, -0.0, 0.5, 1.0], [0.5, 1.0, 3.0]]))
    if levels is None:
        return distances, None
    generator = torch.Generator().manual_seed(seed)
    return distances, torch.tensor(levels)[torch.randint(0, len(levels), (2, n), generator=generator)]


@settings(max_examples=100, deadline=None)
@given(problem=small_problems(), linkage=linkages, data=st.data())
def test_backends_are_the_reference_and_every_merge_is_a_minimum(problem, linkage, data):
    distances, weights = problem
    n = distances.shape[1]
    k = [data.draw(st.integers(1, n)) for _ in range(2)]
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 1.5, 3.0]))
    matrix = explicit(distances, weights)
    expected = agglo.cluster(distances=matrix, k=k, linkage=linkage, backend="reference")
    tree = torch.from_numpy(np.stack([reference.tree(item.numpy(), linkage) for item in matrix]))
    within, counts = agglo.cluster(distances=matrix, threshold=threshold, linkage=linkage, backend="reference")
    for b in range(2):
        assert_every_merge_is_a_minimum(tree[b].numpy(), matrix[b].numpy(), linkage, tolerance=1e-12)
        assert len(expected[b].unique()) == k[b]
        assert np.array_equal(expected[b].numpy(), by_first_member(expected[b].numpy()))
    assert torch.equal(cut(tree, k), expected)
    asked = {"distances": distances, "weights": weights, "linkage": linkage}
    assert torch.equal(agglo.linkage(**asked), tree)
    for backend in BACKENDS:
        assert torch.equal(agglo.cluster(k=k, backend=backend, **asked), expected), backend
        found = agglo.cluster(threshold=threshold, backend=backend, **asked)
        assert torch.equal(found[0], within) and torch.equal(found[1], counts), backend


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 7, 31, 32, 33, 49, 98, 196, 197, 333]), linkages, st.booleans(), st.booleans(), st.data())
def test_partition_tree_and_threshold_are_scipys(n, linkage, negative, weighted, data):
    distances = untied(2, n, seed=data.draw(seeds))
    if negative:  # Ties would come of weights that scale both signs.
        distances = symmetric(distances - 0.5)
    weights = some_weights(2, n, seed=n) if weighted and not negative and n < 150 else None
    matrix = explicit(distances, weights)
    k = data.draw(st.integers(1, n))
    threshold = data.draw(st.sampled_from([-1.0, 0.02001, 0.20003, 0.50003, 3.0]))
    asked = {"distances": distances, "weights": weights, "linkage": linkage}
    trees = agglo.linkage(**asked).numpy()
    for backend in FAST_BACKENDS:
        labels = agglo.cluster(k=k, backend=backend, **asked)
        within, counts = agglo.cluster(threshold=threshold, backend=backend, **asked)
        for b in range(2):
            # SciPy sorts by magnitudes that are not negative; a constant changes no order.
            shift = 0.5 if negative else 0.0
            expected = scipy_tree(symmetric(matrix[b].double() + shift).numpy(), linkage)
            assert np.array_equal(labels[b].numpy(), scipy_labels(expected, k))
            np.testing.assert_array_equal(trees[b][:, [0, 1, 3]], expected[:, [0, 1, 3]])
            np.testing.assert_allclose(trees[b][:, 2] + shift, expected[:, 2], rtol=1e-5, atol=1e-6)
            merged = int((expected[:, 2] - shift <= threshold).sum())
            assert np.array_equal(within[b].numpy(), scipy_labels(expected, n - merged))
            assert counts[b] == n - merged


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(150, 260), linkage=linkages, levels=st.sampled_from([2, 16, 1000]), weighted=st.booleans(), seed=seeds
)
def test_labels_and_tree_agree_on_ties_of_many_tokens(n, linkage, levels, weighted, seed):
    # At these sizes the ways through the backend differ, and rounded means tie where exact ones do not.
    distances = integers(3, n, 0, levels, seed)
    weights = torch.tensor([0.0, 0.25, 1.0, 3.0])[(torch.arange(3 * n) * 7 % 31 % 4).view(3, n)] if weighted else None
    asked = {"distances": distances, "weights": weights, "linkage": linkage}
    tree = agglo.linkage(**asked)
    for k in ([1, n // 4, n // 2], [n - 20, 1, n // 3]):
        assert torch.equal(agglo.cluster(k=k, **asked), cut(tree, k))
    threshold = float(tree[0, n // 2, 2])
    labels, counts = agglo.cluster(threshold=threshold, **asked)
    within = (tree[..., 2].to(torch.float32) <= torch.tensor(threshold, dtype=torch.float32)).sum(dim=1)
    assert torch.equal(counts, n - within)
    assert torch.equal(labels, cut(tree, n - within))
    if seed % 4 == 0:
        assert torch.equal(agglo.cluster(k=n // 2, backend="torch", **asked), cut(tree, n // 2))
    if seed % 8 == 0:
        matrix = explicit(distances[:1], None if weights is None else weights[:1])
        assert np.array_equal(reference.tree(matrix[0].numpy(), linkage), tree[0].numpy())


@pytest.mark.parametrize("linkage", LINKAGES)
def test_large_sets_are_scipys_however_threads_share_them(linkage):
    n = 1301
    features = tokens(3, n, dim=12, seed=n)
    trees = [scipy_tree(matrix.numpy(), linkage) for matrix in symmetric(pairwise(features, "cosine"))]
    for threads, batch in ((1, 1), (2, 1), (2, 3)):
        with torch_threads(threads):
            for k in (1, n // 8, n // 2, int(0.97 * n), n):
                labels = agglo.cluster(features[:batch], k, linkage)
                expected = np.stack([scipy_labels(tree, k) for tree in trees[:batch]])
                assert np.array_equal(labels.numpy(), expected), (threads, batch, k)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", ["tied", "negative", "growing gaps", "weighted"])
def test_large_sets_that_resist(kind, linkage):
    n, weights = 1100, None
    if kind == "tied":
        distances = integers(1, n, 0, 16, seed=1)
    elif kind == "negative":
        distances = symmetric(untied(1, n) - 0.5)
    elif kind == "growing gaps":  # every token's nearest neighbour is the one before: a round merges one pair
        position = torch.cumsum(1.01 ** torch.arange(n, dtype=torch.float64), 0)
        distances = (position[:, None] - position[None]).abs().float()[None]
    else:
        distances, weights = untied(1, n), some_weights(1, n)
    asked = {"distances": distances, "weights": weights, "linkage": linkage}
    tree = agglo.linkage(**asked)
    if kind != "tied":
        matrix = explicit(distances, weights)
        shift = 0.5 if kind == "negative" else 0.0
        expected = scipy_tree(symmetric(matrix[0].double() + shift).numpy(), linkage)
        np.testing.assert_array_equal(tree[0].numpy()[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    threshold = float(tree[0, 400, 2])
    for threads in (1, 3):
        with torch_threads(threads):
            for k in (1, 300, 700, n - 5):
                assert torch.equal(agglo.cluster(k=k, **asked), cut(tree, k)), (threads, k)
            labels, counts = agglo.cluster(threshold=threshold, **asked)
            assert int(counts) == n - int((tree[0, :, 2].float() <= torch.tensor(threshold).float()).sum())
            assert torch.equal(labels, cut(tree, counts))


def test_many_images_in_uneven_chunks():
    # So many that a thread takes several at once, and the last chunk is not full.
    distances, weights = pairwise(tokens(23, 131), "cosine"), some_weights(23, 131)
    k = [1 + 5 * item for item in range(23)]
    labels = agglo.cluster(distances=distances, weights=weights, k=k)
    for b in range(23):
        assert torch.equal(labels[b], agglo.cluster(distances=distances[b], weights=weights[b], k=k[b]))
