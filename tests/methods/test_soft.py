"""SiT, PatchMerger and Sinkhorn against their definitions, written out here in loops over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, logsumexp
from torch import Tensor, nn

from agglo.methods import create
from agglo.methods.soft import QueryMixer, SoftMethod, TokenSlimming, TransportMixer
from tests.support.reductions import built, view

NAMES = ["sit", "patch_merger", "sinkhorn"]
seeds = st.integers(0, 9**6)


def shaken(mixer: nn.Module, seed: int) -> nn.Module:
    """All parameters moved away from where they start, so that none is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return mixer


def array(tensor: Any) -> np.ndarray:
    return tensor.detach().double().numpy()


def plain_norm(x: np.ndarray, norm: nn.LayerNorm) -> np.ndarray:
    rows = [(row - row.mean()) / np.sqrt(row.var() + norm.eps) for row in x]
    return np.array([row * array(norm.weight) + array(norm.bias) for row in rows])


def plain_softmax(row: np.ndarray) -> np.ndarray:
    return np.exp(row - logsumexp(row))


def plain_sit(x: np.ndarray, mixer: TokenSlimming) -> np.ndarray:
    first, _, second = mixer.mlp
    logits = []
    for token in plain_norm(x, mixer.norm):
        hidden = array(first.weight) @ token + array(first.bias)
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        logits.append((array(second.weight) @ hidden) * array(mixer.scale))
    return np.array([plain_softmax(column) for column in np.array(logits).T])


def plain_patch_merger(x: np.ndarray, mixer: QueryMixer) -> np.ndarray:
    normed = plain_norm(x, mixer.norm)
    return np.array([plain_softmax(np.array([query @ token for token in normed])) for query in array(mixer.queries)])


def plain_transport(scores: np.ndarray, iterations: int) -> np.ndarray:
    """Log-domain Sinkhorn with marginals 1 / (K + N) on both sides, the plan times K + N."""
    k, n = scores.shape
    marginal = -np.log(k + n)
    u, v = np.zeros(k), np.zeros(n)
    for _ in range(iterations):
        u = np.array([marginal - logsumexp(scores[c] + v) for c in range(k)])
        v = np.array([marginal - logsumexp(scores[:, i] + u) for i in range(n)])
    return np.array([[np.exp(scores[c, i] + u[c] + v[i]) for i in range(n)] for c in range(k)]) * (k + n)


def plain_sinkhorn(x: np.ndarray, mixer: TransportMixer) -> np.ndarray:
    cosines = [
        [c @ token / np.linalg.norm(c) / np.linalg.norm(token) / mixer.temperature for token in x]
        for c in array(mixer.centres)
    ]
    return plain_transport(np.array(cosines), mixer.iterations)


def plain(x: Tensor, mixer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """New tokens and weights of one image."""
    values = array(x)
    if isinstance(mixer, TokenSlimming):
        weights = plain_sit(values, mixer)
    elif isinstance(mixer, QueryMixer):
        weights = plain_patch_merger(values, mixer)
        values = plain_norm(values, mixer.norm)
    else:
        assert isinstance(mixer, TransportMixer)
        weights = plain_sinkhorn(values, mixer)
        values = np.array([token / np.linalg.norm(token) for token in values])
    return np.array([sum(w * token for w, token in zip(row, values, strict=True)) for row in weights]), weights


def one_stage(name: str, target: int = 5, **changes: Any) -> SoftMethod:
    method = built(create(name, **changes), target=target)
    assert isinstance(method, SoftMethod)
    return method


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, n=st.integers(1, 20), k=st.integers(1, 20), prefix=st.integers(0, 2))
@settings(max_examples=20)
def test_mixers_are_their_definition(name: str, seed: int, n: int, k: int, prefix: int) -> None:
    shown = view(seed, n=n, target=k, prefix=prefix)
    method = one_stage(name, target=k)
    mixer: Any = shaken(method.mixers[0], seed)  # type: ignore[arg-type]
    outcome: Any = method.reduce(shown)
    assert torch.equal(outcome.tokens[:, :prefix], shown.tokens[:, :prefix])
    for b in range(2):
        tokens, weights = plain(shown.patches[b], mixer)
        np.testing.assert_allclose(outcome.tokens[b, prefix:].detach(), tokens, rtol=1e-4, atol=1e-5)
        labels = outcome.grouping.labels[b, prefix:].numpy() - prefix
        np.testing.assert_allclose(weights[labels, np.arange(n)], weights.max(axis=0), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_another_count_than_built_for_is_refused(name: str) -> None:
    method = one_stage(name, 5)
    with pytest.raises(ValueError, match=rf"{name} was built for \[5\].*cannot leave 4 after stage 0"):
        method.reduce(view(target=4))
    with pytest.raises(ValueError, match="after stage 1"):
        method.reduce(view(target=5, stage=1))
