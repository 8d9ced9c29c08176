"""Large images given as features are clustered in the memory of their own distances, with the same result."""

import numpy as np
import pytest
import torch

import agglo
from agglo.clustering import cpu
from agglo.clustering.cpu.keys import FAR
from agglo.clustering.cpu.large import merge_large
from agglo.clustering.distances import pairwise
from tests.support.clusters import by_first_member, distinct_distances, scipy_tree, symmetric, tokens

N = 1301


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def scipy_labels(tree: np.ndarray, k: int) -> np.ndarray:
    """The first N - k merges of SciPy's tree, which has no ties."""
    n = len(tree) + 1
    group = np.arange(n)
    for row in range(n - k):
        group[np.isin(group, tree[row, :2].astype(int))] = n + row
    return by_first_member(group)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("linkage", ["average", "complete"])
def test_features_without_ties_give_scipys_partition(linkage, metric, threads):
    features = tokens(1, N, dim=12, seed=3)
    tree = scipy_tree(symmetric(pairwise(features, metric))[0].numpy(), linkage)
    # From one round to many, also such as end with pairs or with a half of the matrix packed.
    for k in (1, N // 8, N // 2, int(0.7 * N), int(0.97 * N), N - 1, N):
        labels = agglo.cluster(features, k, linkage, metric=metric, backend="cpu")
        assert np.array_equal(labels[0].numpy(), scipy_labels(tree, k)), k


@pytest.mark.parametrize("linkage", ["average", "complete"])
def test_ties_and_weights_give_what_the_tree_says(linkage, threads):
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    tied = tokens(2, 300, seed=1).repeat(1, 4, 1)[:, order]
    weights = torch.randint(0, 3, (2, 1200), generator=torch.Generator().manual_seed(2)).float()
    for own_weights in (None, weights):
        tree = agglo.linkage(tied, linkage, weights=own_weights)
        for k in ([1, 200], [700, 290], [1200, 1000]):
            labels = agglo.cluster(tied, k, linkage, weights=own_weights)
            assert torch.equal(labels, agglo.cut(tree, k)), k


def test_distances_are_measured_again_only_in_doubt(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu, "products", lambda x, measure=cpu.products: calls.append(1) or measure(x))
    features = tokens(1, 1100, dim=12, seed=3)
    agglo.cluster(features, 900, "average")
    assert len(calls) == 1
    tied = torch.randint(-2, 3, (1, 1100, 4), generator=torch.Generator().manual_seed(0)) + 0.5
    agglo.cluster(tied, 100, "complete")
    assert len(calls) == 2
    labels = agglo.cluster(tied, 100, "average")
    assert len(calls) == 4
    assert torch.equal(labels, agglo.cut(agglo.linkage(tied), 100))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("n", [1024, 1025])
def test_the_same_merges_within_the_matrix_and_beside_it(n, average):
    distances = distinct_distances(1, n, seed=n)[0].numpy()
    given = distances.copy()
    for target in (1, n // 4, n // 2, n - 1):
        recorded, work = merge_large(given, target, FAR, average, 1, write_over=False)
        assert np.array_equal(given, distances)
        within, own_work = merge_large(distances.copy(), target, FAR, average, 1, write_over=True)
        assert bool(work.in_doubt[0]) == bool(own_work.in_doubt[0]) is False
        in_order = [np.sort(w.merges[0, :r])[:target] for w, r in ((work, recorded), (own_work, within))]
        assert np.array_equal(*in_order)
        assert own_work.packed.size == own_work.square.size == own_work.sums.size == 0


def test_negative_distances_are_encoded_in_place():
    distances = distinct_distances(1, N, seed=7)[0].numpy() - np.float32(0.5)
    merges = []
    for write_over in (False, True):
        recorded, work = merge_large(distances.copy(), N // 2, FAR, False, 2, write_over=write_over)
        merges.append(np.sort(work.merges[0, :recorded])[: N // 2])
    assert np.array_equal(*merges)
    assert merges[0][0] < 0


def test_data_that_defeats_rounds_within_the_matrix():
    angles = torch.cumsum(1.003 ** torch.arange(1100, dtype=torch.float64), 0)
    angles = angles / angles[-1] * 1.5
    features = torch.stack([angles.cos(), angles.sin()], dim=-1)[None]
    for linkage in ("average", "complete"):
        tree = agglo.linkage(features, linkage)
        for k in (1, 300, 1000):
            assert torch.equal(agglo.cluster(features, k, linkage), agglo.cut(tree, k)), (linkage, k)
