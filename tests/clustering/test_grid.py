"""Tokens on a grid: exact within windows, or with merges of neighbouring groups only."""

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering
from sklearn.feature_extraction.image import grid_to_graph

import agglo
from agglo.clustering import local, windows
from agglo.clustering.grid_edges import edge_distances, neighbours
from tests.support.clusters import LINKAGES, by_first_member, distinct_distances, symmetric, tokens

BACKENDS = ("reference", "cpu", "torch")


def test_docstring_examples():
    assert doctest.testmod(windows).failed == 0
    assert doctest.testmod(windows).attempted > 0


# --- connectivity -----------------------------------------------------------------------------------------------------


def test_edges_are_the_pairs_next_to_each_other():
    for height, width in ((1, 1), (1, 5), (5, 1), (3, 4), (7, 2)):
        place = [(token // width, token % width) for token in range(height * width)]
        expected = [
            (i, j)
            for i in range(height * width)
            for j in range(i + 1, height * width)
            if abs(place[i][0] - place[j][0]) + abs(place[i][1] - place[j][1]) == 1
        ]
        assert list(zip(*(ends.tolist() for ends in neighbours(height, width)), strict=True)) == expected


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_edge_distances_are_those_of_the_matrix(metric, dtype):
    from agglo.clustering.distances import pairwise

    features = tokens(2, 15).to(dtype)
    for height, width in ((3, 5), (1, 15), (15, 1)):
        first, second = neighbours(height, width)
        matrix = pairwise(features, metric)
        found = edge_distances(features, metric, height, width)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, matrix[:, first, second], atol=2e-6, rtol=1e-5)
        assert torch.equal(edge_distances(matrix, "precomputed", height, width), matrix[:, first, second])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("grid", [(1, 2), (1, 9), (8, 1), (3, 3), (5, 7), (9, 6)])
def test_same_partition_as_scikit_learn_with_connectivity(grid, linkage, backend):
    n = grid[0] * grid[1]
    distances = symmetric(torch.rand(2, n, n, generator=torch.Generator().manual_seed(n)))
    for k in sorted({1, 2, n // 4 or 1, n // 2, n - 1, n}):
        labels = agglo.cluster(
            distances=distances, k=k, linkage=linkage, grid=grid, connectivity="grid", backend=backend
        )
        for b in range(2):
            oracle = AgglomerativeClustering(
                n_clusters=k, metric="precomputed", linkage=linkage, connectivity=grid_to_graph(*grid)
            ).fit(distances[b].numpy())
            assert np.array_equal(labels[b].numpy(), by_first_member(oracle.labels_)), f"k={k}"


@st.composite
def tied_grids(draw):
    grid = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    low, high = draw(st.sampled_from([(0, 0), (0, 1), (1, 3), (-2, 2), (0, 9)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    n = grid[0] * grid[1]
    return grid, symmetric(torch.randint(low, high + 1, (2, n, n), generator=generator).float())


@settings(max_examples=80, deadline=None)
@given(tied=tied_grids(), linkage=st.sampled_from(LINKAGES), data=st.data())
def test_backends_agree_on_ties_of_a_grid(tied, linkage, data):
    grid, distances = tied
    n = grid[0] * grid[1]
    k = [data.draw(st.integers(1, n)) for _ in range(2)]
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 1.0, 1.5, 2.25, 5.0]))
    where = {"distances": distances, "linkage": linkage, "grid": grid, "connectivity": "grid"}
    expected = agglo.cluster(k=k, backend="reference", **where)
    assert (expected.amax(dim=1) + 1).tolist() == k
    expected_within, expected_counts = agglo.cluster(threshold=threshold, backend="reference", **where)
    for backend in ("cpu", "torch"):
        assert torch.equal(agglo.cluster(k=k, backend=backend, **where), expected)
        labels, counts = agglo.cluster(threshold=threshold, backend=backend, **where)
        assert torch.equal(labels, expected_within)
        assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_groups_hang_together_and_are_k(linkage):
    from scipy.ndimage import label

    features = tokens(2, 12 * 17)
    for k in (1, 9, 50, 204):
        labels = agglo.cluster(features, k, linkage, grid=(12, 17), connectivity="grid").view(2, 12, 17)
        for image in labels:
            assert len(image.unique()) == k
            assert all(label(image.numpy() == group)[1] == 1 for group in range(k))


@pytest.mark.parametrize("linkage", LINKAGES)
def test_large_grids_agree_and_need_no_matrix(linkage):
    features = torch.nn.functional.avg_pool2d(
        torch.randn(1, 8, 60, 70, generator=torch.Generator().manual_seed(0)), 5, 1, 2
    )
    features = features.flatten(2).transpose(1, 2)
    labels = agglo.cluster(features, 600, linkage, grid=(60, 70), connectivity="grid")
    assert torch.equal(
        labels, agglo.cluster(features, 600, linkage, grid=(60, 70), connectivity="grid", backend="torch")
    )
    many = torch.rand(1, 256 * 256, 4, generator=torch.Generator().manual_seed(1)) + 0.1  # a matrix would take 17 GB
    labels = agglo.cluster(many, 20_000, linkage, grid=(256, 256), connectivity="grid")
    assert int(labels.max()) + 1 == 20_000


def test_a_chain_that_defeats_rounds_is_the_same_on_every_backend():
    lengths = 1.01 ** torch.arange(150, dtype=torch.float64)
    position = torch.cumsum(lengths, 0)
    distances = (position[:, None] - position[None]).abs().float()
    for linkage in LINKAGES:
        where = {"distances": distances, "k": 7, "linkage": linkage, "grid": (1, 150), "connectivity": "grid"}
        expected = agglo.cluster(backend="reference", **where)
        assert all(torch.equal(agglo.cluster(backend=backend, **where), expected) for backend in ("cpu", "torch"))


# --- windows ----------------------------------------------------------------------------------------------------------


def window_numbers(grid: tuple[int, int], window: tuple[int, int]) -> torch.Tensor:
    """Which window every token stands in, (N,)."""
    rows, columns = torch.arange(grid[0]) // window[0], torch.arange(grid[1]) // window[1]
    return (rows[:, None] * (int(columns.max()) + 1) + columns[None]).flatten()


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("grid", "window", "k"), [((8, 8), 4, 20), ((7, 10), (3, 4), 25), ((5, 6), 100, 11), ((1, 9), 2, 5)]
)
def test_windows_are_clustered_each_on_their_own(grid, window, k, backend, linkage):
    n = grid[0] * grid[1]
    features = tokens(2, n)
    sides = (window, window) if isinstance(window, int) else window
    number = window_numbers(grid, sides)
    for asked in ({"features": features}, {"distances": distinct_distances(2, n)}):
        labels = agglo.cluster(**asked, k=k, linkage=linkage, grid=grid, window=window, backend=backend)
        for b in range(2):
            assert len(labels[b].unique()) == k
            assert np.array_equal(labels[b].numpy(), by_first_member(labels[b].numpy()))
            for w in number.unique():
                inside = number == w
                here = labels[b][inside]
                assert set(here.tolist()).isdisjoint(labels[b][~inside].tolist())
                own = (
                    {"features": asked["features"][b, inside]}
                    if "features" in asked
                    else {"distances": asked["distances"][b][inside][:, inside]}
                )
                count = len(here.unique())
                assert abs(count - k * int(inside.sum()) / n) < 1 or count == 1
                expected = agglo.cluster(**own, k=count, linkage=linkage, backend=backend)
                assert torch.equal(torch.from_numpy(by_first_member(here.numpy())), expected)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.data())
def test_shares_add_up_and_are_in_proportion(sizes, data):
    k = data.draw(st.integers(len(sizes), sum(sizes)))
    counts = windows.proportional(k, sizes)
    assert sum(counts) == k
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
    quotas = [k * size / sum(sizes) for size in sizes]
    if min(quotas) >= 1:
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("linkage", LINKAGES)
def test_spread_by_need_takes_the_lowest_merges_of_all_windows(linkage, backend):
    grid, window, n = (5, 7), (2, 3), 35
    distances = distinct_distances(2, n)
    number = window_numbers(grid, window)
    for k in (9, 12, 20, 34, 35):
        labels = agglo.cluster(
            distances=distances, k=k, linkage=linkage, grid=grid, window=window, spread="need", backend=backend
        )
        for b in range(2):
            merges = []
            for w in number.unique():
                inside = number == w
                tree = agglo.linkage(distances=distances[b][inside][:, inside], linkage=linkage, backend="reference")
                merges += [(float(height), int(w)) for height in tree[:, 2]]
            chosen = sorted(merges)[: n - k]
            assert len(labels[b].unique()) == k
            for w in number.unique():
                inside = number == w
                count = int(inside.sum()) - sum(window_of == int(w) for _, window_of in chosen)
                expected = agglo.cluster(distances=distances[b][inside][:, inside], k=count, linkage=linkage)
                assert torch.equal(torch.from_numpy(by_first_member(labels[b][inside].numpy())), expected)


def test_spread_by_need_with_ties_is_exactly_k():
    for k in (4, 17, 30):
        labels = agglo.cluster(torch.ones(3, 36, 4), k, grid=(6, 6), window=3, spread="need")
        assert all(len(item.unique()) == k for item in labels)


def test_threshold_within_windows():
    features = tokens(2, 30)
    labels, counts = agglo.cluster(features, threshold=0.7, grid=(5, 6), window=3)
    number = window_numbers((5, 6), (3, 3))
    for b in range(2):
        expected = [int(agglo.cluster(features[b, number == w], threshold=0.7)[1]) for w in number.unique()]
        assert int(counts[b]) == sum(expected) == len(labels[b].unique())


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{"window": 2}, {"window": 2, "spread": "need"}, {"connectivity": "grid"}])
def test_one_set_half_precision_empty_batch_and_limits(where):
    features = tokens(1, 12)
    labels = agglo.cluster(features, 6, grid=(3, 4), **where)
    assert torch.equal(agglo.cluster(features[0], 6, grid=(3, 4), **where), labels[0])
    half = features.half()
    assert torch.equal(
        agglo.cluster(half, 6, grid=(3, 4), **where), agglo.cluster(half.float(), 6, grid=(3, 4), **where)
    )
    assert agglo.cluster(tokens(0, 12), 6, grid=(3, 4), **where).shape == (0, 12)
    for k in (12, 100):
        assert torch.equal(agglo.cluster(features, k, grid=(3, 4), **where)[0], torch.arange(12))
    assert agglo.cluster(tokens(2, 1), 1, grid=(1, 1), **where).tolist() == [[0], [0]]


@pytest.mark.parametrize("where", [{"window": 4}, {"window": 3, "spread": "need"}, {"connectivity": "grid"}])
def test_compile_full_graph_on_a_grid(where):
    def labels_of(x: torch.Tensor) -> torch.Tensor:
        return agglo.cluster(x * 2, 15, grid=(5, 8), **where) + 1

    x = tokens(2, 40)
    assert torch.equal(torch.compile(labels_of, fullgraph=True, backend="aot_eager")(x), labels_of(x))


def test_operator_keeps_its_contract():
    features = tokens(2, 12)
    for rest in (
        ([2, 2], "need", 6, None, None),
        ([], "even", None, torch.tensor([2, 5]), None),
        ([], "even", None, None, 0.3),
    ):
        torch.library.opcheck(local.cluster_local, (features, "cosine", "average", 3, 4, *rest, True, ""))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": (3, 5), "window": 2}, r"grid=\(3, 5\) must be \(height, width\) with height \* width = 12"),
        ({"grid": (-3, -4), "window": 2}, r"grid=\(-3, -4\) must be"),
        ({"grid": (12,), "window": 2}, r"grid=\(12,\) must be"),
        ({"window": 2}, "window=2 needs grid"),
        ({"connectivity": "grid"}, "connectivity='grid' needs grid"),
        ({"grid": (3, 4)}, "either window or connectivity, not neither"),
        ({"grid": (3, 4), "window": 2, "connectivity": "grid"}, "either window or connectivity, not both"),
        ({"grid": (3, 4), "connectivity": "knn"}, "connectivity='knn' is not known; accepted: 'grid'"),
        ({"grid": (3, 4), "window": 0}, "window=0 must be an int >= 1"),
        ({"grid": (3, 4), "window": (2, 2, 2)}, r"window=\(2, 2, 2\) must be"),
        ({"grid": (3, 4), "window": 2.0}, "window=2.0 must be"),
        ({"grid": (3, 4), "window": 2, "spread": "evenly"}, "spread='evenly' is not known; accepted: 'even', 'need'"),
        ({"grid": (3, 4), "connectivity": "grid", "spread": "need"}, "spread='need' needs window"),
        ({"grid": (3, 4), "window": 1, "k": 11}, "k=11 is less than the 12 windows of 1 x 1 on a grid of 3 x 4"),
        ({"grid": (3, 4), "window": 2, "k": [5, 6]}, "with window, k must be one int"),
        ({"grid": (3, 4), "connectivity": "grid", "backend": "triton"}, "backend='triton'"),
    ],
    ids=str,
)
def test_bad_grid_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        agglo.cluster(tokens(2, 12), **{"k": 6, **arguments})


@pytest.mark.parametrize("where", [{"window": 2}, {"connectivity": "grid"}])
def test_bad_numbers_on_a_grid(where):
    features = tokens(2, 12)
    features[1, 3, 0] = float("nan")
    with pytest.raises(ValueError, match="features of batch item 1 hold NaN"):
        agglo.cluster(features, 6, grid=(3, 4), **where)
    for backend in ("cpu", "torch"):
        labels = agglo.cluster(features, 6, grid=(3, 4), check=False, backend=backend, **where)
        assert all(len(item.unique()) == 6 for item in labels)
