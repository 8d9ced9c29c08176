"""K-Medoids and DPC-KNN against their definitions, written out here in loops over images, clusters and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.clustering.centres import density_peaks, euclidean_distances, farthest_points, k_medoids
from agglo.methods import create
from agglo.methods.centres import DPCKNN, KMedoids
from tests.support.reductions import built, view

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("kmedoids", {}),
    ("kmedoids", {"weights": "equal"}),
    ("kmedoids", {"released": True}),
    ("dpc_knn", {}),
    ("dpc_knn", {"weights": "equal"}),
]
seeds = st.integers(0, 9**6)


@st.composite
def sizes_of_problems(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(1, 24))
    return n, draw(st.integers(1, n))


def random_tokens(seed: int, n: int, batch: int = 2, width: int = 6) -> Tensor:
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(seed))


def plain_distances(tokens: Tensor) -> np.ndarray:
    x = tokens.double().numpy()
    return np.array([[np.sqrt(((a - b) ** 2).sum()) for b in x] for a in x])


def plain_nearest(distances: np.ndarray, centres: list[int]) -> list[int]:
    labels = [min(range(len(centres)), key=lambda c: distances[centres[c], i]) for i in range(len(distances))]
    for number, centre in enumerate(centres):
        labels[centre] = number
    return labels


def plain_medoids(
    distances: np.ndarray, first: list[int], weights: np.ndarray, iterations: int, over_all: bool
) -> list[int]:
    n, medoids = len(distances), list(first)
    for _ in range(iterations):
        labels = plain_nearest(distances, medoids)
        for c in range(len(medoids)):
            members = [i for i in range(n) if labels[i] == c]

            def cost(i: int, members: list[int] = members) -> float:
                if over_all:
                    return float(weights[i] * sum(distances[i, j] for j in range(n)))
                return float(sum(weights[j] * distances[i, j] for j in members))

            least = min(map(cost, members))
            # Of two tokens on their own either costs the same: the first is meant, whatever rounding says.
            medoids[c] = next(i for i in members if cost(i) <= least * (1 + (0 if over_all else 1e-4)))
    return medoids


def plain_farthest(distances: np.ndarray, k: int, start: int, from_all: bool) -> list[int]:
    chosen = [start]
    while len(chosen) < k:
        rest = [i for i in range(len(distances)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min if from_all else max)(distances[i, c] for c in chosen)))
    return chosen


def plain_dpc_knn(tokens: Tensor, k: int, neighbours: int) -> tuple[list[int], list[int]]:
    n, width = tokens.shape
    distances = plain_distances(tokens) / np.sqrt(width)
    density = [np.exp(-np.mean(sorted(distances[i] ** 2)[:neighbours])) for i in range(n)]
    delta = []
    for i in range(n):
        denser = [distances[i, j] for j in range(n) if density[j] > density[i]]
        delta.append(min(denser) if denser else distances.max())
    centres = sorted(range(n), key=lambda i: -density[i] * delta[i])[:k]
    return centres, plain_nearest(distances, centres)


@given(seed=seeds, n=st.integers(1, 24), squared=st.booleans())
@settings(max_examples=20)
def test_distances(seed: int, n: int, squared: bool) -> None:
    tokens = random_tokens(seed, n)
    distances = euclidean_distances(tokens + 5, squared=squared)
    for b in range(2):
        expected = plain_distances(tokens[b])
        np.testing.assert_allclose(distances[b], expected**2 if squared else expected, rtol=1e-3, atol=2e-3)
    assert not distances.diagonal(dim1=1, dim2=2).any()


@given(seed=seeds, sizes=sizes_of_problems(), from_all=st.booleans())
@settings(max_examples=30)
def test_farthest_points_are_their_definition(seed: int, sizes: tuple[int, int], from_all: bool) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    distances = torch.cdist(tokens, tokens)
    start = torch.tensor([seed % n, 0])
    chosen = farthest_points(distances, k, start, from_all)
    for b in range(2):
        assert chosen[b].tolist() == plain_farthest(distances[b].double().numpy(), k, int(start[b]), from_all)


@given(
    seed=seeds, sizes=sizes_of_problems(), iterations=st.integers(0, 4), over_all=st.booleans(), weighted=st.booleans()
)
@settings(max_examples=60)
def test_k_medoids_is_its_definition(
    seed: int, sizes: tuple[int, int], iterations: int, over_all: bool, weighted: bool
) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, n, generator=generator)
    first = torch.stack([torch.randperm(n, generator=generator)[:k] for _ in range(2)])
    distances = euclidean_distances(tokens)
    given_weights = weights if weighted else None
    medoids, labels = k_medoids(distances, first, given_weights, iterations, over_all)
    for b in range(2):
        plain_weights = weights[b].double().numpy() if weighted else np.ones(n)
        exact = plain_distances(tokens[b])
        expected = plain_medoids(exact, first[b].tolist(), plain_weights, iterations, over_all)
        assert medoids[b].tolist() == expected
        assert labels[b].tolist() == plain_nearest(exact, expected)


@given(seed=seeds, sizes=sizes_of_problems(), neighbours=st.integers(1, 8))
@settings(max_examples=60)
def test_density_peaks_are_their_definition(seed: int, sizes: tuple[int, int], neighbours: int) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    centres, labels = density_peaks(euclidean_distances(tokens, squared=True), k, neighbours, 6)
    for b in range(2):
        expected_centres, expected_labels = plain_dpc_knn(tokens[b], k, neighbours)
        # With fewer neighbours densities are equal by symmetry, and rounding decides.
        if min(n, neighbours) > 2:
            assert centres[b].tolist() == expected_centres
            assert labels[b].tolist() == expected_labels
        assert sorted(set(labels[b].tolist())) == list(range(k))


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_labels_are_labels_whatever_the_distances(value: float) -> None:
    matrix, weights = torch.full((2, 9, 9), value), torch.ones(2, 9)
    chosen = farthest_points(matrix, 4, torch.tensor([0, 8]), True)
    for centres, labels in (
        k_medoids(matrix, chosen, weights, 3, False),
        k_medoids(matrix, chosen, None, 3, True),
        density_peaks(matrix, 4, 5, 8),
    ):
        assert ((centres >= 0) & (centres < 9)).all() and ((labels >= 0) & (labels < 4)).all()
        if value == 0:
            assert all(len(set(row)) == 4 for row in centres.tolist() + labels.tolist())


def test_kmedoids_keeps_medoids_as_they_are() -> None:
    shown = view(sizes=torch.arange(1.0, 15).expand(2, 14))
    outcome = KMedoids().reduce(shown)
    tokens = outcome.new_tokens(shown.tokens)
    assert torch.equal(tokens[:, 0], shown.tokens[:, 0])
    for b in range(2):
        exact, weights = plain_distances(shown.patches[b]), shown.attention_received[b, 1:].double().numpy()
        first = sorted(range(13), key=lambda i: -weights[i])[:5]
        medoids = plain_medoids(exact, first, weights, 3, over_all=False)
        assert torch.equal(tokens[b, 1:], shown.patches[b, medoids])
        labels = plain_nearest(exact, medoids)
        assert outcome.grouping.labels[b].tolist() == [0, *(label + 1 for label in labels)]
        for c in range(5):
            assert outcome.grouping.sizes[b, 1 + c] == sum(i + 2 for i in range(13) if labels[i] == c)


@pytest.mark.parametrize("weights", ["learned", "equal"])
def test_dpc_knn_takes_weighted_means(weights: str) -> None:
    shown = view(sizes=torch.arange(1.0, 15).expand(2, 14))
    method = built(DPCKNN(weights))
    assert isinstance(method, DPCKNN)
    outcome: Any = method.reduce(shown)
    torch.testing.assert_close(outcome.tokens[:, 0], shown.tokens[:, 0])
    for b in range(2):
        _, labels = plain_dpc_knn(shown.patches[b], 5, 5)
        x = shown.patches[b].double().numpy()
        score = method.scorers[0].weight[0].detach().double().numpy() if weights == "learned" else np.zeros(8)
        for c in range(5):
            members = [i for i in range(13) if labels[i] == c]
            exponentials = [np.exp(x[i] @ score) for i in members]
            mean = sum(e * x[i] for e, i in zip(exponentials, members, strict=True)) / sum(exponentials)
            np.testing.assert_allclose(outcome.tokens[b, 1 + c].detach(), mean, rtol=1e-4, atol=1e-5)
            assert outcome.grouping.sizes[b, 1 + c] == sum(i + 2 for i in members)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_equal_tokens_still_make_k_groups(name: str, options: dict[str, Any]) -> None:
    few = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    for tokens in (torch.zeros(2, 14, 8), few[:, torch.arange(14) % 3]):
        shown = view(tokens=tokens, target=7)
        outcome = built(create(name, **options), target=7).reduce(shown)
        assert (outcome.grouping.sizes > 0).all()
        assert outcome.grouping.sizes.sum(1).tolist() == [14.0, 14.0]
