"""Weighted distances: D[i, j] * max(w[i], w[j]), on every backend and every way through one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster import hierarchy

import agglo
from agglo.clustering.distances import pairwise
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


def some_weights(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """Between 0.01 and 100, about 1 in the middle."""
    return 100 ** (2 * torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) - 1)


def explicit(distances: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition pair by pair, (B, N, N)."""
    batch, n, _ = distances.shape
    given, w, result = distances.numpy(), weights.float().numpy(), np.zeros((batch, n, n), np.float32)
    for b in range(batch):
        for i in range(n):
            for j in range(n):
                result[b, i, j] = given[b, i, j] * max(w[b, i], w[b, j])
    return torch.from_numpy(result)


# --- without ties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("n", [2, 5, 33, 98])
def test_tree_is_scipys_of_the_weighted_matrix(n, linkage):
    distances, weights = distinct_distances(2, n, seed=n), some_weights(2, n, seed=n)
    expected = [scipy_tree(matrix.numpy(), linkage) for matrix in explicit(distances, weights)]
    for backend in BACKENDS:
        trees = agglo.linkage(distances=distances, weights=weights, linkage=linkage, backend=backend)
        for b in range(2):
            np.testing.assert_array_equal(trees[b].numpy()[:, [0, 1, 3]], expected[b][:, [0, 1, 3]])
            np.testing.assert_allclose(trees[b].numpy()[:, 2], expected[b][:, 2], rtol=1e-5)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_features_as_scikit_learn_on_the_weighted_matrix(metric, linkage):
    n = 61
    features, weights = tokens(2, n, seed=3), some_weights(2, n, seed=3)
    matrix = explicit(pairwise(features, metric), weights)
    for k in (1, 15, 30, n - 1, n):
        expected = np.stack([sklearn_labels(item.numpy(), k, linkage) for item in matrix])
        for backend in BACKENDS:
            labels = agglo.cluster(features, k, linkage, weights=weights, metric=metric, backend=backend)
            assert np.array_equal(labels.numpy(), expected), (k, backend)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_threshold_is_compared_with_weighted_distances(linkage):
    distances, weights = distinct_distances(2, 40), some_weights(2, 40)
    matrix = explicit(distances, weights)
    for threshold in (0.0201, 0.3003, 2.003):
        for backend in BACKENDS:
            labels, counts = agglo.cluster(
                distances=distances, weights=weights, threshold=threshold, linkage=linkage, backend=backend
            )
            for b in range(2):
                tree = scipy_tree(matrix[b].numpy(), linkage)
                expected = by_first_member(hierarchy.fcluster(tree, threshold, "distance"))
                assert np.array_equal(labels[b].numpy(), expected)
                assert counts[b] == expected.max() + 1
    assert not torch.equal(counts, agglo.cluster(distances=distances, threshold=2.003, linkage=linkage)[1])


def test_a_heavy_token_merges_last_and_a_light_pair_first():
    features = tokens(1, 30)[0]
    weights = torch.ones(30)
    weights[7], weights[[4, 19]] = 1e6, 1e-6
    for linkage in LINKAGES:
        assert agglo.cluster(features, 2, linkage, weights=weights).tolist() == [int(i == 7) for i in range(30)]
        tree = agglo.linkage(features, linkage, weights=weights)
        assert tree[0, :2].tolist() == [4, 19]


# --- ties, and weights of zero ----------------------------------------------------------------------------------------


@st.composite
def tied_and_weighted(draw):
    """Small integer distances, some negative, and weights with zeros among them: exact products, ties everywhere."""
    n = draw(st.integers(1, 19))
    low, high = draw(st.sampled_from([(0, 1), (1, 3), (-3, 2), (0, 9)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    distances = symmetric(torch.randint(low, high + 1, (2, n, n), generator=generator).float())
    levels = torch.tensor(draw(st.sampled_from([[0.0], [0.0, 1.0], [0.0, -0.0, 0.5, 1.0], [0.5, 1.0, 3.0]])))
    return distances, levels[torch.randint(0, len(levels), (2, n), generator=generator)]


@settings(max_examples=80, deadline=None)
@given(tied=tied_and_weighted(), linkage=st.sampled_from(LINKAGES), data=st.data())
def test_backends_agree_on_ties_with_weights(tied, linkage, data):
    distances, weights = tied
    n = distances.shape[1]
    k = [data.draw(st.integers(1, n)) for _ in range(2)]
    matrix = explicit(distances, weights)
    expected = agglo.cluster(distances=matrix, k=k, linkage=linkage, backend="reference")
    tree = agglo.linkage(distances=matrix, linkage=linkage, backend="reference")
    for b in range(2):
        assert_every_merge_is_a_minimum(tree[b].numpy(), matrix[b].numpy(), linkage, tolerance=1e-12)
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 1.0, 1.5, 3.0]))
    within = agglo.cluster(distances=matrix, threshold=threshold, linkage=linkage, backend="reference")
    for backend in BACKENDS:
        asked = {"distances": distances, "weights": weights, "linkage": linkage, "backend": backend}
        assert torch.equal(agglo.cluster(k=k, **asked), expected)
        assert torch.equal(agglo.linkage(**asked), tree)
        for found, wanted in zip(agglo.cluster(threshold=threshold, **asked), within, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_without_any_weight_the_first_tokens_merge_first(linkage, backend):
    # All distances are 0: the first pair merges, then the next token joins it, and so on.
    for n, k in ((2, 1), (9, 4), (70, 33), (70, 1), (70, 70)):
        labels = agglo.cluster(tokens(2, n), k, linkage, weights=torch.zeros(2, n), backend=backend)
        expected = torch.cat([torch.zeros(n - k, dtype=torch.int64), torch.arange(k)])
        assert torch.equal(labels, expected.expand(2, n)), (n, k)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_weightless_tokens_come_together_before_others_move(linkage):
    n = 150
    light = torch.arange(n) % 3 == 1
    weights = some_weights(1, n).masked_fill(light, 0.0)
    features = tokens(1, n)
    for backend in FAST_BACKENDS:
        labels = agglo.cluster(features, n - int(light.sum()) + 1, linkage, weights=weights, backend=backend)[0]
        assert len(labels[light].unique()) == 1
        assert len(labels.unique()) == n - int(light.sum()) + 1


@pytest.mark.parametrize("seed", range(6))
def test_labels_and_tree_agree_on_tied_weighted_means(seed):
    # Sizes at which rounded means tie where exact ones do not; weights of few bits keep the products exact.
    n = 154 + 17 * seed
    generator = torch.Generator().manual_seed(seed)
    distances = symmetric(torch.randint(0, 16, (4, n, n), generator=generator).float())
    weights = torch.tensor([0.0, 0.25, 1.0, 3.0])[torch.randint(int(seed % 2), 4, (4, n), generator=generator)]
    tree = agglo.linkage(distances=distances, weights=weights, backend="cpu")
    ks = [1, n // 4, n // 2, n - 20]
    for turn in range(4):
        k = ks[turn:] + ks[:turn]
        assert torch.equal(agglo.cluster(distances=distances, weights=weights, k=k, backend="cpu"), agglo.cut(tree, k))
    if seed < 2:
        assert torch.equal(
            agglo.cluster(distances=distances, weights=weights, k=ks, backend="torch"), agglo.cut(tree, ks)
        )


def test_duplicated_tokens_of_equal_weight_merge_alike_on_every_way():
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    features = tokens(3, 25, seed=2).repeat(1, 4, 1)[:, order]
    weights = some_weights(3, 25).repeat(1, 4)[:, order]
    tree = agglo.linkage(features, weights=weights)
    assert torch.equal(tree, agglo.linkage(features, weights=weights, backend="torch"))
    for k in (1, 15, 30, 60, 80):
        labels = agglo.cluster(features, k, weights=weights)
        assert torch.equal(labels, agglo.cut(tree, k))
        assert torch.equal(labels, agglo.cluster(features, k, weights=weights, backend="torch"))


# --- every way through the cpu backend --------------------------------------------------------------------------------


@pytest.mark.parametrize("linkage", LINKAGES)
def test_a_large_set_is_the_same_shared_by_threads_or_not(linkage):
    n = 1030
    features, weights = tokens(1, n), some_weights(1, n)
    distances = pairwise(features, "cosine")
    matrix = distances * torch.maximum(weights[:, :, None], weights[:, None, :])
    expected = [agglo.cluster(distances=matrix, k=k, linkage=linkage) for k in (30, 515, 1000)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for at, k in enumerate((30, 515, 1000)):
                for given in ({"features": features}, {"distances": distances}):
                    labels = agglo.cluster(**given, weights=weights, k=k, linkage=linkage)
                    assert torch.equal(labels, expected[at]), (threads, k, list(given))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_many_images_in_uneven_chunks(linkage):
    # So many that a thread takes several at once, and the last chunk is not full.
    batch, n = 23, 131
    distances, weights = pairwise(tokens(batch, n), "cosine"), some_weights(batch, n)
    k = [1 + 5 * item for item in range(batch)]
    labels = agglo.cluster(distances=distances, weights=weights, k=k, linkage=linkage)
    for b in range(batch):
        alone = agglo.cluster(distances=distances[b], weights=weights[b], k=k[b], linkage=linkage)
        assert torch.equal(labels[b], alone)


# --- what weights may be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_equal_weights_change_nothing_but_heights(linkage, backend):
    features = tokens(2, 50)
    tree = agglo.linkage(features, linkage, backend=backend)
    for weight in (1.0, 0.25):
        same = torch.full((2, 50), weight)
        assert torch.equal(
            agglo.cluster(features, 13, linkage, weights=same, backend=backend),
            agglo.cluster(features, 13, linkage, backend=backend),
        )
        scaled = agglo.linkage(features, linkage, weights=same, backend=backend)
        assert torch.equal(scaled, tree * torch.tensor([1, 1, weight, 1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_is_weighted_in_float32(dtype):
    features, weights = tokens(2, 50).to(dtype), some_weights(2, 50).to(dtype)
    expected = agglo.cluster(features.float(), 10, weights=weights.float())
    assert torch.equal(agglo.cluster(features, 10, weights=weights), expected)
    assert torch.equal(agglo.cluster(features.float(), 10, weights=weights), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(agglo.cluster(features, 10, weights=weights), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_one_set_one_token_all_groups_and_empty_batch(linkage, backend):
    features, weights = tokens(1, 20), some_weights(1, 20)
    whole = agglo.cluster(features, 5, linkage, weights=weights, backend=backend)
    assert torch.equal(agglo.cluster(features[0], 5, linkage, weights=weights[0], backend=backend), whole[0])
    one_tree = agglo.linkage(features[0], linkage, weights=weights[0], backend=backend)
    assert torch.equal(one_tree, agglo.linkage(features, linkage, weights=weights, backend=backend)[0])
    for k in (20, 21):
        assert torch.equal(agglo.cluster(features, k, linkage, weights=weights, backend=backend)[0], torch.arange(20))
    assert agglo.cluster(tokens(2, 1), 1, linkage, weights=some_weights(2, 1), backend=backend).tolist() == [[0], [0]]
    assert agglo.linkage(tokens(2, 1), linkage, weights=some_weights(2, 1), backend=backend).shape == (2, 0, 4)
    assert agglo.cluster(tokens(0, 7), 3, linkage, weights=some_weights(0, 7), backend=backend).shape == (0, 7)
    assert agglo.linkage(tokens(0, 7), linkage, weights=some_weights(0, 7), backend=backend).shape == (0, 6, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_is_left_as_it_was_and_may_have_any_strides(backend):
    distances, weights = distinct_distances(3, 30), some_weights(3, 30)
    strided = torch.stack([weights, -weights], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    before = distances.clone(), weights.clone()
    expected = agglo.cluster(distances=distances, weights=weights, k=7, backend=backend)
    assert torch.equal(agglo.cluster(distances=distances, weights=strided, k=7, backend=backend), expected)
    learnt = weights.clone().requires_grad_()
    labels = agglo.cluster(distances=distances, weights=learnt, k=7, backend=backend)
    assert torch.equal(labels, expected)
    agglo.linkage(distances=distances, weights=weights, backend=backend)
    assert torch.equal(distances, before[0])
    assert torch.equal(weights, before[1])
    shared = weights[:1].expand(3, 30)
    assert torch.equal(
        agglo.cluster(distances=distances, weights=shared, k=7, backend=backend),
        agglo.cluster(distances=distances, weights=shared.contiguous(), k=7, backend=backend),
    )


# --- refusals ---------------------------------------------------------------------------------------------------------

FEATURES, DISTANCES = tokens(2, 6), distinct_distances(2, 6)


def spoilt(value: float) -> torch.Tensor:
    weights = torch.ones(2, 6)
    weights[1, 4] = value
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2, 5), r"weights must be one per token, \(B, N\) = \(2, 6\), got shape \(2, 5\)"),
        (torch.ones(6), r"weights must be one per token, \(B, N\) = \(2, 6\), got shape \(6,\)"),
        (torch.ones(2, 6, 1), r"got shape \(2, 6, 1\)"),
        (torch.ones(2, 6, dtype=torch.int64), "weights must hold real floating point numbers, got dtype torch.int64"),
        (np.ones((2, 6), np.float32), "weights must be a torch.Tensor, got ndarray"),
        (torch.ones(2, 6, device="meta"), "weights are on meta, what they weigh is on cpu"),
        (spoilt(-0.5), "weights of batch item 1 hold -0.5 at token 4; they must be finite and at least 0"),
        (spoilt(float("nan")), "weights of batch item 1 hold nan at token 4"),
        (spoilt(float("inf")), "weights of batch item 1 hold inf at token 4"),
        (
            spoilt(3e38),
            r"weights of batch item 1 reach 3e\+38: times distances of up to .* out of the range",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_weights_are_named(weights, message):
    large = DISTANCES * 100
    calls = (
        lambda: agglo.cluster(FEATURES, 2, weights=weights),
        lambda: agglo.cluster(FEATURES * 100, 2, weights=weights, metric="euclidean", backend="torch"),
        lambda: agglo.cluster(distances=large, threshold=0.1, weights=weights),
        lambda: agglo.linkage(distances=large, weights=weights, backend="reference"),
        lambda: agglo.cluster(FEATURES, 3, weights=weights, grid=(2, 3), window=2),
        lambda: agglo.cluster(FEATURES, 3, weights=weights, grid=(2, 3), connectivity="grid"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_weights_of_one_set_have_one_dimension():
    with pytest.raises(ValueError, match=r"\(N,\) = \(6,\), got shape \(1, 6\)"):
        agglo.cluster(FEATURES[0], 2, weights=torch.ones(1, 6))


def test_bad_distances_are_not_blamed_on_weights():
    distances = DISTANCES.clone()
    distances[1, 2, 3] = float("inf")
    with pytest.raises(ValueError, match="distances of batch item 1 hold NaN or infinity"):
        agglo.cluster(distances=distances, k=2, weights=torch.full((2, 6), 5.0))
    skewed = DISTANCES.clone()
    skewed[1, 2, 3] += 9
    with pytest.raises(ValueError, match="distances of batch item 1 are not symmetric"):
        agglo.cluster(distances=skewed, k=2, weights=torch.zeros(2, 6))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_unchecked_bad_weights_still_give_k_groups(value):
    for backend in FAST_BACKENDS:
        for linkage in LINKAGES:
            asked = {"k": 2, "linkage": linkage, "weights": spoilt(value), "check": False, "backend": backend}
            labels = agglo.cluster(FEATURES, **asked)
            expected = agglo.cluster(FEATURES[0], 2, linkage, backend=backend)
            assert torch.equal(labels[0], expected)
            assert len(labels[1].unique()) == 2


# --- tokens on a grid -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("where", [{"window": 3}, {"window": (2, 4), "spread": "need"}, {"connectivity": "grid"}])
def test_on_a_grid_as_with_the_weighted_matrix(where, linkage, backend):
    grid = (5, 7)
    distances, weights = distinct_distances(2, 35), some_weights(2, 35)
    asked = {"linkage": linkage, "grid": grid, "backend": backend, **where}
    matrix = explicit(distances, weights)
    for k in (12, 20):
        expected = agglo.cluster(distances=matrix, k=k, **asked)
        assert torch.equal(agglo.cluster(distances=distances, weights=weights, k=k, **asked), expected)
    assert not torch.equal(expected, agglo.cluster(distances=distances, k=20, **asked))
    labels, counts = agglo.cluster(distances=distances, weights=weights, threshold=0.2, **asked | {"spread": "even"})
    expected, expected_counts = agglo.cluster(distances=matrix, threshold=0.2, **asked | {"spread": "even"})
    assert torch.equal(labels, expected)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("where", [{"window": 4}, {"connectivity": "grid"}])
def test_features_on_a_grid_take_weights(where):
    features, weights = tokens(2, 48).half(), some_weights(2, 48).half()
    labels = agglo.cluster(features, 20, grid=(6, 8), weights=weights, **where)
    assert torch.equal(labels, agglo.cluster(features.float(), 20, grid=(6, 8), weights=weights.float(), **where))
    by_hand = agglo.cluster(features, 20, grid=(6, 8), weights=torch.ones(2, 48), **where)
    assert torch.equal(by_hand, agglo.cluster(features, 20, grid=(6, 8), **where))
    assert not torch.equal(by_hand, labels)
    heavy = torch.ones(2, 48)
    heavy[:, 9] = 1e6
    assert ((labels := agglo.cluster(features, 20, grid=(6, 8), weights=heavy, **where)) == labels[:, 9:10]).sum() == 2
