"""K-Medoids and DPC-KNN against their definitions, written out here in loops over images, clusters and tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.clustering.centres import cpu as cpu_centres
from agglo.clustering.centres import density_peaks, euclidean_distances, farthest_points, k_medoids
from agglo.clustering.centres import torch as torch_centres
from agglo.methods import create
from agglo.methods.dpc_knn import DPCKNN, softmax_within
from agglo.methods.kmedoids import KMedoids
from tests.support.reductions import built, lively_vit, new_tokens, view

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("kmedoids", {}),
    ("kmedoids", {"weights": "equal"}),
    ("kmedoids", {"released": True}),
    ("dpc_knn", {}),
    ("dpc_knn", {"weights": "equal"}),
]
seeds = st.integers(0, 9**6)
backends = pytest.mark.parametrize("backend", [cpu_centres, torch_centres], ids=["cpu", "torch"])


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


@backends
@given(seed=seeds, n=st.integers(1, 24), squared=st.booleans())
@settings(max_examples=20)
def test_distances(backend: ModuleType, seed: int, n: int, squared: bool) -> None:
    tokens = random_tokens(seed, n)
    found = tokens @ tokens.mT
    backend.become_euclidean(found, squared)
    for distances in (found, euclidean_distances(tokens + 5, squared=squared)):
        for b in range(2):
            expected = plain_distances(tokens[b])
            np.testing.assert_allclose(distances[b], expected**2 if squared else expected, rtol=1e-3, atol=2e-3)
        assert not distances.diagonal(dim1=1, dim2=2).any()


@backends
@given(seed=seeds, sizes=sizes_of_problems(), from_all=st.booleans())
@settings(max_examples=30)
def test_farthest_points_are_their_definition(
    backend: ModuleType, seed: int, sizes: tuple[int, int], from_all: bool
) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    distances = torch.cdist(tokens, tokens)
    start = torch.tensor([seed % n, 0])
    chosen = backend.farthest_points(distances, k, start, from_all)
    for b in range(2):
        assert chosen[b].tolist() == plain_farthest(distances[b].double().numpy(), k, int(start[b]), from_all)


@backends
@given(
    seed=seeds, sizes=sizes_of_problems(), iterations=st.integers(0, 4), over_all=st.booleans(), weighted=st.booleans()
)
@settings(max_examples=60)
def test_k_medoids_is_its_definition(
    backend: ModuleType, seed: int, sizes: tuple[int, int], iterations: int, over_all: bool, weighted: bool
) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, n, generator=generator)
    first = torch.stack([torch.randperm(n, generator=generator)[:k] for _ in range(2)])
    distances = euclidean_distances(tokens)
    given_weights = weights if weighted else None
    medoids, labels = backend.k_medoids(distances, first, given_weights, iterations, over_all, rounding=1e-4)
    for b in range(2):
        plain_weights = weights[b].double().numpy() if weighted else np.ones(n)
        exact = plain_distances(tokens[b])
        expected = plain_medoids(exact, first[b].tolist(), plain_weights, iterations, over_all)
        assert medoids[b].tolist() == expected
        assert labels[b].tolist() == plain_nearest(exact, expected)


@backends
@given(seed=seeds, sizes=sizes_of_problems(), neighbours=st.integers(1, 8))
@settings(max_examples=60)
def test_density_peaks_are_their_definition(
    backend: ModuleType, seed: int, sizes: tuple[int, int], neighbours: int
) -> None:
    n, k = sizes
    tokens = random_tokens(seed, n)
    centres, labels = backend.density_peaks(euclidean_distances(tokens, squared=True), k, neighbours, 6)
    for b in range(2):
        expected_centres, expected_labels = plain_dpc_knn(tokens[b], k, neighbours)
        # With fewer neighbours densities are equal by symmetry, and rounding decides.
        if min(n, neighbours) > 2:
            assert centres[b].tolist() == expected_centres
            assert labels[b].tolist() == expected_labels
        assert sorted(set(labels[b].tolist())) == list(range(k))


@pytest.mark.parametrize("n", [50, 196])
def test_backends_agree(n: int) -> None:
    tokens = random_tokens(0, n, batch=5, width=16)
    squares = euclidean_distances(tokens, squared=True)
    distances = squares.clamp(min=0).sqrt()
    weights = torch.rand(5, n, generator=torch.Generator().manual_seed(0))
    start = torch.arange(5)
    for k in (1, n // 3, n):
        for flag in (True, False):
            far = [backend.farthest_points(distances, k, start, flag) for backend in (cpu_centres, torch_centres)]
            assert torch.equal(*far)
            for given_weights in (weights, None):
                one, two = (
                    backend.k_medoids(distances, far[0], given_weights, 3, flag, rounding=1e-4)
                    for backend in (cpu_centres, torch_centres)
                )
                assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
        one, two = (backend.density_peaks(squares, k, 5, 16) for backend in (cpu_centres, torch_centres))
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@backends
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_labels_are_labels_whatever_the_distances(backend: ModuleType, value: float) -> None:
    matrix, weights = torch.full((2, 9, 9), value), torch.ones(2, 9)
    chosen = backend.farthest_points(matrix, 4, torch.tensor([0, 8]), True)
    for centres, labels in (
        backend.k_medoids(matrix, chosen, weights, 3, False, rounding=1e-4),
        backend.k_medoids(matrix, chosen, None, 3, True, rounding=1e-4),
        backend.density_peaks(matrix, 4, 5, 8),
    ):
        assert ((centres >= 0) & (centres < 9)).all() and ((labels >= 0) & (labels < 4)).all()
        if value == 0:
            assert all(len(set(row)) == 4 for row in centres.tolist() + labels.tolist())


def test_operators_are_known_to_torch() -> None:
    squares = euclidean_distances(random_tokens(0, 9), squared=True)
    first = torch.tensor([[0, 1, 2], [3, 4, 5]])
    torch.library.opcheck(k_medoids, (squares, first, torch.rand(2, 9), 2, False))
    torch.library.opcheck(k_medoids, (squares, first, None, 2, True))
    torch.library.opcheck(farthest_points, (squares, 3, first[:, 0].clone(), True))
    torch.library.opcheck(density_peaks, (squares, 3, 5, 6))


def test_kmedoids_keeps_medoids_as_they_are() -> None:
    shown = view(sizes=torch.arange(1.0, 15).expand(2, 14))
    outcome = KMedoids().reduce(shown)
    tokens = new_tokens(outcome, shown)
    assert shown.attention_received is not None
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


def test_equal_kmedoids_starts_at_the_centre() -> None:
    shown = view(attention_received=None)
    outcome = KMedoids("equal").reduce(shown)
    for b in range(2):
        exact = plain_distances(shown.patches[b])
        first = plain_farthest(exact, 5, int(exact.sum(axis=1).argmin()), from_all=True)
        medoids = plain_medoids(exact, first, np.ones(13), 3, over_all=False)
        assert torch.equal(new_tokens(outcome, shown)[b, 1:], shown.patches[b, medoids])


def test_released_equal_kmedoids_follow_the_random_generator() -> None:
    shown, method = view(n=40), KMedoids("equal", released=True)
    results = set()
    for seed in range(8):
        torch.manual_seed(seed)
        start = int(torch.randint(40, (1,)))
        torch.manual_seed(seed)
        tokens = new_tokens(method.reduce(shown), shown)
        exact = plain_distances(shown.patches[0])
        first = plain_farthest(exact, 5, start, from_all=False)
        assert torch.equal(tokens[0, 1:], shown.patches[0, plain_medoids(exact, first, np.ones(40), 3, True)])
        results.add(tokens.sum().item())
    assert len(results) > 1


@pytest.mark.parametrize("weights", ["learned", "equal"])
def test_dpc_knn_takes_weighted_means(weights: str) -> None:
    shown = view(sizes=torch.arange(1.0, 15).expand(2, 14))
    method = built(DPCKNN(weights))
    assert isinstance(method, DPCKNN)
    outcome = method.reduce(shown)
    assert outcome.tokens is not None
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


def test_scores_do_not_overflow() -> None:
    weights = softmax_within(torch.tensor([[1000.0, 999.0, -1000.0]]), torch.tensor([[0, 0, 1]]), 2)
    torch.testing.assert_close(weights, torch.tensor([[0.7310586, 0.2689414, 1.0]]))


def test_dpc_knn_gradients_reach_scorers_and_tokens() -> None:
    tokens = view().tokens.requires_grad_()
    method = built(DPCKNN())
    outcome = method.reduce(view(tokens=tokens))
    assert outcome.tokens is not None
    (outcome.tokens * torch.randn_like(outcome.tokens)).sum().backward()
    assert tokens.grad is not None and (tokens.grad.abs().amax(-1) > 0).all()
    assert isinstance(method, DPCKNN)
    for parameter in method.parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0


@pytest.mark.parametrize(("name", "options"), METHODS)
@pytest.mark.parametrize("target", [1, 4, 12, 13])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_every_count(name: str, options: dict[str, Any], target: int, batch: int, prefix: int) -> None:
    shown = view(batch=batch, target=target, prefix=prefix)
    outcome = built(create(name, **options), target=target, prefix=prefix).reduce(shown)
    tokens = new_tokens(outcome, shown)
    assert tokens.shape == (batch, prefix + target, 8)
    assert (outcome.grouping.sizes > 0).all()
    if target == 13:
        patches = outcome.grouping.unmerge(tokens)
        torch.testing.assert_close(patches, shown.tokens)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_equal_tokens_still_make_k_groups(name: str, options: dict[str, Any]) -> None:
    few = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    for tokens in (torch.zeros(2, 14, 8), few[:, torch.arange(14) % 3]):
        shown = view(tokens=tokens, target=7)
        outcome = built(create(name, **options), target=7).reduce(shown)
        assert (outcome.grouping.sizes > 0).all()
        assert outcome.grouping.sizes.sum(1).tolist() == [14.0, 14.0]


@backends
def test_far_tokens_have_densities_too(backend: ModuleType) -> None:
    """exp(-d^2) of all of these is 0 in float32."""
    tokens = random_tokens(0, 20) * 1e3
    centres, labels = backend.density_peaks(euclidean_distances(tokens, squared=True), 6, 5, 6)
    distances = plain_distances(tokens[0]) / np.sqrt(6)
    log_density = [-np.mean(sorted(row**2)[:5]) for row in distances]
    expected = {}
    for i in range(20):
        denser = [distances[i, j] for j in range(20) if log_density[j] > log_density[i]]
        expected[i] = log_density[i] + np.log(min(denser) if denser else distances.max())
    assert centres[0].tolist() == sorted(expected, key=lambda i: -expected[i])[:6]
    assert labels[0].tolist() == plain_nearest(distances, centres[0].tolist())


@pytest.mark.parametrize(("name", "options"), METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_groups_are_those_of_float32(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    half = view(tokens=view(n=40).tokens.to(dtype), n=40)
    method = built(create(name, **options))
    full = method.reduce(view(tokens=half.tokens.float(), n=40))
    if isinstance(method, DPCKNN):
        method.to(dtype)
    outcome = method.reduce(half)
    assert torch.equal(outcome.grouping.labels, full.grouping.labels)
    tokens = new_tokens(outcome, half)
    assert tokens.dtype == dtype
    torch.testing.assert_close(tokens.float(), new_tokens(full, half).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_nan_gives_labels_all_the_same(name: str, options: dict[str, Any]) -> None:
    shown = view(tokens=torch.full((2, 14, 8), torch.nan), attention_received=torch.full((2, 14), torch.nan))
    outcome = built(create(name, **options)).reduce(shown)
    assert ((outcome.grouping.labels >= 0) & (outcome.grouping.labels < 6)).all()
    assert new_tokens(outcome, shown).isnan().any(dim=-1).any()


def test_weights_are_the_attention_of_the_block_before() -> None:
    """Nothing but the initial medoids, so that they show which tokens were attended to most."""
    model = lively_vit()
    images = torch.randn(2, 3, 56, 56)
    block = model.blocks[2]
    seen: list[Tensor] = []
    handle = block.attn.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(images)
    handle.remove()
    q, k, _ = seen[0].reshape(2, 197, 3, 3, 8).permute(2, 0, 3, 1, 4)
    received = (q @ k.transpose(-2, -1) / 8**0.5).softmax(dim=-1).sum(dim=(1, 2))[:, 1:]
    agglo.apply(model, "kmedoids", keep_rate=0.5, iterations=0)
    with agglo.trace(model) as trace:
        model(images)
    chosen = trace.steps[0].outcome.grouping.chosen
    assert chosen is not None
    assert torch.equal(chosen[:, 1:].sort(dim=1).values - 1, received.topk(98, dim=1).indices.sort(dim=1).values)
