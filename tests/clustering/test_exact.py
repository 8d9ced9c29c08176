"""Every backend gives the partition the definition asks for: SciPy's without ties, a valid one with ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agglo
from tests.support.clusters import (
    BACKENDS,
    FAST_BACKENDS,
    LINKAGES,
    assert_every_merge_is_a_minimum,
    by_first_member,
    distinct_distances,
    scipy_tree,
    sklearn_labels,
    symmetric,
    tokens,
)

PLANE = [0, 5, 12, 40, 43, 90, 100, 170]
CHAIN = [0, 9, 18.5, 28.2, 38.1, 48.5, 70, 71, 100, 115.5]
# (angles in degrees, linkage, groups) of unit vectors under cosine distance
GOLDEN = [
    (PLANE, "any", "01 2 34 5 6 7"),
    (PLANE, "single", "012 34 5 6 7"),
    (PLANE, "average", "012 34 5 6 7"),
    (PLANE, "complete", "01 2 34 56 7"),
    (PLANE, "any", "012 34 56 7"),
    (PLANE, "any", "01234 56 7"),
    (PLANE, "single", "0123456 7"),
    (PLANE, "average", "01234 567"),
    (PLANE, "complete", "01234 567"),
    (CHAIN, "single", "012345 67 8 9"),
    (CHAIN, "average", "0123 45 67 89"),
    (CHAIN, "complete", "0123 45 67 89"),
    (CHAIN, "single", "012345 67 89"),
    (CHAIN, "average", "0123 4567 89"),
    (CHAIN, "complete", "0123 4567 89"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("angles", "linkage", "groups"), GOLDEN)
def test_golden_vectors(angles, linkage, groups, backend):
    radians = torch.tensor(angles, dtype=torch.float64).deg2rad()
    features = torch.stack([radians.cos(), radians.sin()], dim=1)
    expected = torch.empty(len(angles), dtype=torch.int64)
    for label, members in enumerate(groups.split()):
        expected[[int(member) for member in members]] = label
    for name in LINKAGES if linkage == "any" else (linkage,):
        labels = agglo.cluster(features, k=len(groups.split()), linkage=name, backend=backend)
        assert torch.equal(labels, expected), name


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("n", [2, 3, 4, 7, 31, 32, 33, 49, 98, 196, 197, 333])
def test_same_partition_as_scikit_learn(n, linkage, backend):
    distances = distinct_distances(2, n, seed=n)
    for k in sorted({1, 2, n // 4 or 1, n // 2, n - 1, n}):
        labels = agglo.cluster(distances=distances, k=k, linkage=linkage, backend=backend)
        for b in range(2):
            expected = sklearn_labels(distances[b].numpy(), k, linkage)
            assert np.array_equal(labels[b].numpy(), expected), f"k={k}"


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("n", [576, 1024])
def test_same_partition_as_scikit_learn_on_large_sets(n, linkage):
    features = tokens(3, n, seed=n)
    unit = torch.nn.functional.normalize(features, dim=-1)
    distances = symmetric(1 - unit @ unit.transpose(1, 2))
    for k in (1, n // 8, n // 2, n - n // 10):
        expected = [sklearn_labels(distances[b].numpy(), k, linkage) for b in range(3)]
        for batch in (1, 3):  # one large set is shared by the threads, several are spread over them
            labels = agglo.cluster(distances=distances[:batch], k=k, linkage=linkage, backend="cpu")
            assert np.array_equal(labels.numpy(), np.stack(expected[:batch])), f"k={k}"
    labels = agglo.cluster(distances=distances[:1], k=n // 2, linkage=linkage, backend="torch")
    assert np.array_equal(labels[0].numpy(), sklearn_labels(distances[0].numpy(), n // 2, linkage))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("n", [2, 5, 64, 150])
def test_tree_is_scipys(n, linkage, backend):
    distances = distinct_distances(2, n, seed=n)
    trees = agglo.linkage(distances=distances, linkage=linkage, backend=backend)
    assert trees.shape == (2, n - 1, 4)
    assert trees.dtype == torch.float64
    assert (trees[:, 1:, 2] >= trees[:, :-1, 2]).all()
    for b in range(2):
        expected = scipy_tree(distances[b].numpy(), linkage)
        np.testing.assert_array_equal(trees[b].numpy()[:, [0, 1, 3]], expected[:, [0, 1, 3]])
        np.testing.assert_allclose(trees[b].numpy()[:, 2], expected[:, 2], rtol=1e-5)


def test_tree_is_drawn_by_scipy():
    from scipy.cluster import hierarchy

    tree = agglo.linkage(tokens(1, 30)[0]).numpy()
    assert hierarchy.is_valid_linkage(tree, throw=True)
    assert hierarchy.is_monotonic(tree)
    assert sorted(hierarchy.dendrogram(tree, no_plot=True)["leaves"]) == list(range(30))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_many_cuts_from_one_tree(linkage, backend):
    distances = distinct_distances(3, 40)
    tree = agglo.linkage(distances=distances, linkage=linkage, backend=backend)
    for k in range(1, 41):
        expected = agglo.cluster(distances=distances, k=k, linkage=linkage, backend=backend)
        assert torch.equal(agglo.cut(tree, k), expected)
    assert torch.equal(agglo.cut(tree, [3, 40, 1])[1], torch.arange(40))


# --- ties -------------------------------------------------------------------------------------------------------------


@st.composite
def tied_distances(draw):
    """Small integer distances, some negative: ties everywhere."""
    n = draw(st.integers(2, 20))
    low, high = draw(st.sampled_from([(0, 0), (0, 1), (1, 3), (-3, 2), (0, 9)]))
    seed = draw(st.integers(0, 2**16))
    values = torch.randint(low, high + 1, (2, n, n), generator=torch.Generator().manual_seed(seed))
    return symmetric(values.to(torch.float32))


@settings(max_examples=60, deadline=None)
@given(distances=tied_distances(), linkage=st.sampled_from(LINKAGES), backend=st.sampled_from(BACKENDS))
def test_with_ties_every_merge_is_a_minimum(distances, linkage, backend):
    trees = agglo.linkage(distances=distances, linkage=linkage, backend=backend)
    for b in range(len(trees)):
        assert_every_merge_is_a_minimum(trees[b].numpy(), distances[b].numpy(), linkage, tolerance=1e-5)


@settings(max_examples=60, deadline=None)
@given(distances=tied_distances(), linkage=st.sampled_from(LINKAGES), backend=st.sampled_from(BACKENDS), data=st.data())
def test_with_ties_exactly_k_groups_as_the_tree_says(distances, linkage, backend, data):
    n = distances.shape[1]
    k = data.draw(st.integers(1, n))
    labels = agglo.cluster(distances=distances, k=k, linkage=linkage, backend=backend)
    for row in labels:
        assert len(row.unique()) == k
        assert np.array_equal(row.numpy(), by_first_member(row.numpy()))
    tree = agglo.linkage(distances=distances, linkage=linkage, backend=backend)
    assert torch.equal(labels, agglo.cut(tree, k))


@settings(max_examples=60, deadline=None)
@given(distances=tied_distances(), linkage=st.sampled_from(LINKAGES), data=st.data())
def test_backends_agree_on_ties(distances, linkage, data):
    k = data.draw(st.integers(1, distances.shape[1]))
    labels = [agglo.cluster(distances=distances, k=k, linkage=linkage, backend=backend) for backend in BACKENDS]
    assert all(torch.equal(labels[0], other) for other in labels[1:])
    trees = [agglo.linkage(distances=distances, linkage=linkage, backend=backend) for backend in BACKENDS]
    assert all(torch.equal(trees[0], other) for other in trees[1:])


def integers(batch: int, n: int, levels: int, seed: int) -> torch.Tensor:
    values = torch.randint(0, levels, (batch, n, n), generator=torch.Generator().manual_seed(seed))
    return symmetric(values.to(torch.float32))


@pytest.mark.parametrize("seed", range(60))
def test_labels_and_tree_agree_on_tied_means(seed):
    # Sizes and levels at which the ways through the cpu backend differ and rounded means tie where exact ones do not.
    n = 154 + seed * 104 // 59
    distances = integers(4, n, 16, seed)
    tree = agglo.linkage(distances=distances, backend="cpu")
    ks = [1, n // 4, n // 2, n - 20]
    for turn in range(4):
        k = ks[turn:] + ks[:turn]
        labels = agglo.cluster(distances=distances, k=k, backend="cpu")
        assert torch.equal(labels, agglo.cut(tree, k))
    threshold = float(tree[0, n // 2, 2])
    labels, counts = agglo.cluster(distances=distances, threshold=threshold, backend="cpu")
    within = (tree[..., 2].to(torch.float32) <= torch.tensor(threshold, dtype=torch.float32)).sum(dim=1)
    assert torch.equal(counts, n - within)
    assert torch.equal(labels, agglo.cut(tree, n - within))
    if seed % 6 == 0:
        assert torch.equal(agglo.cluster(distances=distances, k=ks, backend="torch"), agglo.cut(tree, ks))
    if seed % 20 == 0:
        assert torch.equal(agglo.linkage(distances=distances[:1], backend="reference"), tree[:1])
        assert torch.equal(agglo.linkage(distances=distances[:1], backend="torch"), tree[:1])


@pytest.mark.parametrize("levels", [2, 16, 1000])
def test_a_large_tied_set_is_the_same_shared_by_threads_or_not(levels):
    distances = integers(1, 1100, levels, seed=levels)
    tree = agglo.linkage(distances=distances)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for k in (1, 300, 700, 1050):
                assert torch.equal(agglo.cluster(distances=distances, k=k), agglo.cut(tree, k)), (threads, k)
    finally:
        torch.set_num_threads(before)


def test_heights_of_average_linkage_are_exact_means():
    distances = integers(1, 90, 7, seed=5)
    for backend in FAST_BACKENDS:
        tree = agglo.linkage(distances=distances, backend=backend)[0].numpy()
        assert_every_merge_is_a_minimum(tree, distances[0].numpy(), "average", tolerance=1e-14)


def test_duplicated_tokens_merge_alike_on_every_way():
    # Cosine distances of repeated tokens: ties of means of numbers that are not round.
    features = tokens(3, 50, seed=2).repeat(1, 4, 1)[:, torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    tree = agglo.linkage(features)
    for k in (1, 30, 60, 120, 160):
        labels = agglo.cluster(features, k)
        assert torch.equal(labels, agglo.cut(tree, k))
        assert torch.equal(labels, agglo.cluster(features, k, backend="torch"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_duplicates_and_all_equal_tokens(linkage, backend):
    duplicated = tokens(1, 20)[0].repeat(4, 1)
    equal = torch.ones(80, 16)
    for features in (duplicated, equal):
        for k in (1, 30, 50, 70, 80):
            labels = agglo.cluster(features, k=k, linkage=linkage, backend=backend)
            assert len(labels.unique()) == k


def chain_of_growing_gaps(n: int) -> torch.Tensor:
    """Every token's nearest neighbour is the one before it: a round merges one pair only."""
    position = torch.cumsum(1.01 ** torch.arange(n, dtype=torch.float64), 0)
    return (position[:, None] - position[None]).abs().to(torch.float32)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("batch", [1, 2])
def test_data_that_defeats_rounds(linkage, batch):
    n = 1100
    distances = chain_of_growing_gaps(n).expand(batch, n, n)
    for k in (1, 3, n // 2, n - 5):
        expected = sklearn_labels(distances[0].numpy(), k, linkage)
        labels = agglo.cluster(distances=distances, k=k, linkage=linkage, backend="cpu")
        assert np.array_equal(labels[0].numpy(), expected), f"k={k}"


@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_negative_distances_keep_their_order(linkage, backend):
    distances = distinct_distances(2, 60) - 0.5
    labels = agglo.cluster(distances=symmetric(distances), k=13, linkage=linkage, backend=backend)
    expected = agglo.cluster(distances=distinct_distances(2, 60), k=13, linkage=linkage, backend="reference")
    assert torch.equal(labels, expected)


# --- threshold --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("n", [2, 50, 120])
def test_threshold_cuts_scipys_tree_by_distance(n, linkage, backend):
    from scipy.cluster import hierarchy

    distances = distinct_distances(2, n, seed=3)
    for threshold in (-1.0, 0.05003, 0.20003, 0.50003, 2.0):
        labels, counts = agglo.cluster(distances=distances, threshold=threshold, linkage=linkage, backend=backend)
        for b in range(2):
            tree = scipy_tree(distances[b].numpy(), linkage)
            expected = by_first_member(hierarchy.fcluster(tree, threshold, "distance"))
            if threshold < 0:
                expected = np.arange(n)
            assert np.array_equal(labels[b].numpy(), expected)
            assert counts[b] == expected.max() + 1


def test_threshold_of_large_sets_and_of_a_merge_itself():
    distances = distinct_distances(1, 1200, seed=5)
    tree = agglo.linkage(distances=distances, linkage="complete")[0]
    for merges in (1, 400, 1100):
        threshold = float(tree[merges - 1, 2])
        labels, counts = agglo.cluster(distances=distances, threshold=threshold, linkage="complete")
        done = int((tree[:, 2] <= threshold).sum())  # the merge at the threshold is within it
        assert done >= merges
        assert int(counts) == 1200 - done
        assert torch.equal(labels[0], agglo.cut(tree, 1200 - done))
