"""ATC beyond the paper: distances weighted by importance, options per reduction, means that keep their length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import agglo
from agglo.grouping import Grouping
from agglo.methods import ATC, create
from tests.support.reductions import lively_vit, view


def attention_of(shown: Any, importance: str) -> Tensor:
    attention: Tensor = shown.class_attention.mean(1) if importance == "class" else shown.attention_received
    return attention[:, shown.prefix :]


def weighted_distances(features: Tensor, attention: Tensor, exponent: float) -> Tensor:
    """Of one image's features (N, D), straight from the definition, in float64."""
    n = len(features)
    weights = [float(a / attention.double().mean()) ** exponent for a in attention.double()]
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    distances = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            distances[i, j] = (1 - float(unit[i] @ unit[j])) * max(weights[i], weights[j]) if i != j else 0
    return distances.clamp(min=0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9**6),
    n=st.integers(2, 16),
    prefix=st.integers(0, 2),
    linkage=st.sampled_from(["average", "single", "complete"]),
    importance=st.sampled_from(["class", "received"]),
    exponent=st.sampled_from([0.25, 0.5, 1.0, 4.0]),
    share=st.floats(0, 1),
)
def test_groups_are_those_of_the_weighted_distances(
    seed: int, n: int, prefix: int, linkage: str, importance: str, exponent: float, share: float
) -> None:
    shown = view(seed, n=n, prefix=prefix, target=1 + round(share * (n - 1)))
    method = ATC(linkage, "tokens", importance=importance, exponent=exponent)
    grouping = method.reduce(shown).grouping
    for image in range(2):
        distances = weighted_distances(shown.patches[image], attention_of(shown, importance)[image], exponent)
        expected = agglo.cluster(distances=distances.float(), k=shown.target, linkage=linkage, backend="reference")
        assert torch.equal(grouping.labels[image, prefix:] - prefix, expected)


@pytest.mark.parametrize(("importance", "linkage"), [("class", "average"), ("received", "complete")])
def test_a_threshold_is_for_weighted_distances_and_ignores_padding(importance: str, linkage: str) -> None:
    """Image 0 has 9 real tokens and image 1 has 13. What attention says of padding does not matter."""
    counts, sizes = torch.tensor([9, 13]), torch.ones(2, 14)
    sizes[0, 10:] = 0
    for threshold in (0.4, 1.0, 1e9):
        shown = replace(view(target=None), threshold=threshold, sizes=sizes, counts=counts)
        grouping: Any = ATC(linkage, "tokens", importance=importance, exponent=1.0).reduce(shown).grouping
        for image, count in enumerate(counts.tolist()):
            attention = attention_of(shown, importance)[image, :count]
            distances = weighted_distances(shown.patches[image, :count], attention, 1.0).float()
            labels, groups = agglo.cluster(
                distances=distances, threshold=threshold, linkage=linkage, backend="reference"
            )
            assert torch.equal(grouping.labels[image, 1 : 1 + count] - 1, labels)
            assert grouping.counts[image] == groups
        alone = replace(shown, counts=None, sizes=None)
        whole = ATC(linkage, "tokens", importance=importance, exponent=1.0).reduce(alone).grouping
        assert torch.equal(whole.labels[1], grouping.labels[1])


@torch.no_grad()
def test_models_without_a_class_token() -> None:
    model, x = lively_vit(32, 4, class_token=False, global_pool="avg"), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="atc asks what the class token attends to, and this model has none"):
        agglo.apply(model, "atc", keep_rate=0.5, importance="class")
    plain = agglo.apply(model, "atc", keep_rate=0.5)(x)
    received = agglo.apply(model, "atc", keep_rate=0.5, importance="received")(x)
    assert received.isfinite().all()
    assert not torch.allclose(received, plain)


@pytest.mark.parametrize("method", ["atc", "tome", "pool"])
def test_merged_tokens_may_keep_their_length(method: str) -> None:
    shown = view(n=16, target=9, grid=(4, 4))
    outcome = create(method, mean="preserve_norm").reduce(shown)
    expected = outcome.grouping.merge(shown.tokens, "preserve_norm")
    assert torch.equal(outcome.new_tokens(shown.tokens), expected)
    assert not torch.equal(create(method).reduce(shown).new_tokens(shown.tokens), expected)


def test_ignored_sizes_are_ignored_in_lengths_too() -> None:
    sizes = torch.tensor([1.0, *range(1, 14)]).expand(2, 14)
    shown = view(sizes=sizes)
    outcome = ATC(sizes="ignored", mean="preserve_norm").reduce(shown)
    ones = Grouping.of(outcome.grouping.labels[:, 1:] - 1, 5, 1)
    torch.testing.assert_close(outcome.new_tokens(shown.tokens), ones.merge(shown.tokens, "preserve_norm"))
    assert torch.equal(outcome.grouping.sizes.sum(1), sizes.sum(1))
