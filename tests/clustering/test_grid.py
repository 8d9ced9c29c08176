"""Tokens on a grid: exact within windows, or with merges of neighbouring groups only."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering
from sklearn.feature_extraction.image import grid_to_graph

import agglo
from agglo.clustering.distances import pairwise, weighted
from agglo.clustering.grid import windows
from tests.support.clusters import BACKENDS, LINKAGES, by_first_member, symmetric, tokens

PLACES = [{"window": 2}, {"window": (3, 2), "spread": "need"}, {"connectivity": "grid"}]
linkages = st.sampled_from(LINKAGES)


@st.composite
def problems(draw, most: int = 7):
    """A grid, distances (2, N, N) with or without ties, and weights or None."""
    grid = draw(st.tuples(st.integers(1, most), st.integers(1, most)))
    n, generator = grid[0] * grid[1], torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    bounds = draw(st.sampled_from([None, (0, 1), (0, 2), (1, 4), (-2, 3), (0, 10)]))
    values = torch.rand(2, n, n, generator=generator)
    if bounds is not None:
        values = torch.randint(*bounds, (2, n, n), generator=generator).float()
    weights = torch.randint(0, 4, (2, n), generator=generator) / 2 if draw(st.booleans()) else None
    return grid, symmetric(values), weights


@settings(max_examples=30, deadline=None)
@given(grid=st.sampled_from([(1, 2), (1, 9), (8, 1), (3, 3), (5, 7), (9, 6)]), linkage=linkages, data=st.data())
def test_same_partition_as_scikit_learn_with_connectivity(grid, linkage, data):
    n = grid[0] * grid[1]
    distances = symmetric(torch.rand(1, n, n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))))
    k = data.draw(st.integers(1, n))
    oracle = AgglomerativeClustering(k, metric="precomputed", linkage=linkage, connectivity=grid_to_graph(*grid))
    expected = by_first_member(oracle.fit(distances[0].numpy()).labels_)
    for backend in BACKENDS:
        asked = {"linkage": linkage, "grid": grid, "connectivity": "grid", "backend": backend}
        assert np.array_equal(agglo.cluster(distances=distances, k=k, **asked)[0].numpy(), expected), backend


@settings(max_examples=50, deadline=None)
@given(problem=problems(), linkage=linkages, data=st.data())
def test_backends_are_the_reference_with_connectivity(problem, linkage, data):
    grid, distances, weights = problem
    k = [data.draw(st.integers(1, grid[0] * grid[1])) for _ in range(2)]
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.5, 2.25, 5.0]))
    matrix = distances if weights is None else weighted(distances, weights)
    asked = {"linkage": linkage, "grid": grid, "connectivity": "grid"}
    expected = agglo.cluster(distances=matrix, k=k, backend="reference", **asked)
    assert (expected.amax(dim=1) + 1).tolist() == k
    within, counts = agglo.cluster(distances=matrix, threshold=threshold, backend="reference", **asked)
    for backend in BACKENDS:
        given = {"distances": distances, "weights": weights, "backend": backend, **asked}
        assert torch.equal(agglo.cluster(k=k, **given), expected), backend
        found = agglo.cluster(threshold=threshold, **given)
        assert torch.equal(found[0], within) and torch.equal(found[1], counts), backend


@pytest.mark.parametrize("linkage", LINKAGES)
def test_large_grids_hang_together_and_need_no_matrix(linkage):
    from scipy.ndimage import label

    noise = torch.randn(1, 8, 60, 70, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.avg_pool2d(noise, 5, 1, 2).flatten(2).transpose(1, 2)
    labels = agglo.cluster(smooth, 100, linkage, grid=(60, 70), connectivity="grid")
    assert all(label(labels.view(60, 70).numpy() == group)[1] == 1 for group in range(100))
    many = torch.rand(1, 256 * 256, 4, generator=torch.Generator().manual_seed(1)) + 0.1  # a matrix would take 17 GB
    labels = agglo.cluster(many, 20_000, linkage, grid=(256, 256), connectivity="grid")
    assert int(labels.max()) + 1 == 20_000


def window_numbers(grid: tuple[int, int], window: tuple[int, int]) -> torch.Tensor:
    """Which window every token stands in, (N,)."""
    rows, columns = torch.arange(grid[0]) // window[0], torch.arange(grid[1]) // window[1]
    return (rows[:, None] * (int(columns.max()) + 1) + columns[None]).flatten()


@settings(max_examples=40, deadline=None)
@given(problem=problems(), window=st.tuples(st.integers(1, 8), st.integers(1, 8)), linkage=linkages, data=st.data())
def test_windows_are_clustered_each_on_their_own(problem, window, linkage, data):
    grid, distances, weights = problem
    backend, spread = data.draw(st.sampled_from(BACKENDS)), data.draw(st.sampled_from(["even", "need", "threshold"]))
    number, n = window_numbers(grid, window), grid[0] * grid[1]
    k = data.draw(st.integers(len(number.unique()), n))
    matrix = distances if weights is None else weighted(distances, weights)
    inside = [number == w for w in number.unique()]
    trees = [[agglo.linkage(distances=matrix[b][i][:, i], linkage=linkage) for i in inside] for b in range(2)]

    asked = {"distances": distances, "weights": weights, "linkage": linkage, "grid": grid, "window": window}
    if spread == "threshold":
        labels, found = agglo.cluster(threshold=0.5, backend=backend, **asked)
        counts = [[int((tree[:, 2] > 0.5).sum()) + 1 for tree in trees[b]] for b in range(2)]
        assert found.tolist() == [sum(row) for row in counts]
    else:
        labels = agglo.cluster(k=k, spread=spread, backend=backend, **asked)
        assert (labels.amax(dim=1) + 1).tolist() == [k, k]
        counts = [windows.proportional(k, [int(i.sum()) for i in inside])] * 2
    if spread == "need":  # the lowest merges of all windows
        counts = []
        for row in trees:
            chosen = sorted((float(height), w) for w, tree in enumerate(row) for height in tree[:, 2])[: n - k]
            counts.append([int(i.sum()) - sum(of == w for _, of in chosen) for w, i in enumerate(inside)])
    for b in range(2):
        assert np.array_equal(labels[b].numpy(), by_first_member(labels[b].numpy()))
        for w, tokens_inside in enumerate(inside):
            here = labels[b][tokens_inside]
            assert set(here.tolist()).isdisjoint(labels[b][~tokens_inside].tolist())
            expected = agglo.clustering.cut(trees[b][w], counts[b][w])
            assert np.array_equal(by_first_member(here.numpy()), expected.numpy())


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.data())
def test_shares_add_up_and_are_in_proportion(sizes, data):
    k = data.draw(st.integers(len(sizes), sum(sizes)))
    counts = windows.proportional(k, sizes)
    assert sum(counts) == k
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
    if k * min(sizes) >= sum(sizes):
        assert all(abs(count - k * size / sum(sizes)) < 1 for count, size in zip(counts, sizes, strict=True))


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_features_one_set_half_precision_empty_batch_and_limits(where):
    features, asked = tokens(2, 12), {"grid": (3, 4), **where}
    labels = agglo.cluster(features, 6, **asked)
    for metric in ("cosine", "euclidean"):
        expected = agglo.cluster(distances=pairwise(features, metric), k=6, **asked)
        assert torch.equal(agglo.cluster(features, 6, metric=metric, **asked), expected)
    assert torch.equal(agglo.cluster(features[0], 6, **asked), labels[0])
    half, weights = features.half(), torch.linspace(0.5, 2, 24).view(2, 12).half()
    expected = agglo.cluster(half.float(), 6, weights=weights.float(), **asked)
    assert torch.equal(agglo.cluster(half, 6, weights=weights, **asked), expected)
    assert agglo.cluster(tokens(0, 12), 6, **asked).shape == (0, 12)
    assert torch.equal(agglo.cluster(features, 100, **asked)[0], torch.arange(12))
    features[1, 3, 0] = float("nan")
    with pytest.raises(ValueError, match="features of batch item 1"):
        agglo.cluster(features, 6, **asked)
    assert all(len(item.unique()) == 6 for item in agglo.cluster(features, 6, check=False, **asked))


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        (r"grid=\(3, 5\)", {"grid": (3, 5), "window": 2}),
        ("window needs grid", {"grid": None, "window": 2}),
        ("connectivity needs grid", {"grid": None, "connectivity": "grid"}),
        ("window or connectivity", {}),
        ("window or connectivity", {"window": 2, "connectivity": "grid"}),
        ("spread='need'", {"connectivity": "grid", "spread": "need"}),
        ("k=11", {"window": 1, "k": 11}),
        ("k must", {"window": 2, "k": [5, 6]}),
    ],
)
def test_bad_grid_arguments_are_named(named, arguments):
    with pytest.raises(ValueError, match=named):
        agglo.cluster(tokens(2, 12), **{"k": 6, "grid": (3, 4), **arguments})
