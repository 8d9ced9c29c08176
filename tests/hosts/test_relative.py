"""Relative position bias of merged tokens, against the definition written out; and attention with a bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.attention import (
    attention_received,
    attention_with_received,
    class_attention,
    policy_attention,
    proportional_attention,
)
from agglo.grouping import Grouping
from agglo.hosts.common.positions import RelativeBias


def brute_force(table: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """The mean over all pairs of members: (H, G, G)."""
    merged = table.new_zeros(table.shape[0], n_groups, n_groups)
    for a in range(n_groups):
        for b in range(n_groups):
            merged[:, a, b] = table[:, labels == a][:, :, labels == b].mean(dim=(1, 2))
    return merged


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 2), st.integers(0, 9**6))
def test_two_merges_give_the_mean_over_all_pairs_of_members(n: int, heads: int, prefix: int, seed: int) -> None:
    torch.manual_seed(seed)
    table = torch.randn(1, heads, prefix + n, prefix + n)
    k = int(torch.randint(1, n + 1, ()))
    first = torch.stack([torch.cat([torch.arange(k), torch.randint(k, (n - k,))])[torch.randperm(n)] for _ in range(2)])
    one = Grouping.of(first, k, prefix)
    second = (torch.arange(k) // 2).expand(2, -1)
    two = Grouping.of(second, (k + 1) // 2, prefix, one.sizes)
    bias = RelativeBias().after(one).after(two).between(table)
    total = one.then(two)
    for image in range(2):
        wanted = brute_force(table[0], total.labels[image], total.n_groups)
        torch.testing.assert_close(bias[image], wanted, rtol=0, atol=1e-5)


def test_nothing_merged_is_the_librarys_own_table() -> None:
    table = torch.randn(1, 2, 5, 5)
    assert RelativeBias().between(table) is table


def test_softly_mixed_tokens_take_their_shares() -> None:
    table, weights = torch.randn(1, 2, 4, 4), torch.rand(1, 2, 3)
    grouping = Grouping.of(torch.tensor([[0, 1, 1]]), 2, prefix=1)
    bias = RelativeBias().after(grouping, weights).between(table)
    shares = torch.zeros(3, 4)
    shares[0, 0] = 1
    shares[1:, 1:] = weights[0] / weights[0].sum(dim=1, keepdim=True)
    torch.testing.assert_close(bias[0], shares @ table[0] @ shares.T)


@pytest.mark.parametrize("batch_of_bias", [1, 3])
@pytest.mark.parametrize("heads_of_bias", [1, 2])
@pytest.mark.parametrize("sized", [False, True])
def test_every_attention_adds_the_bias(batch_of_bias: int, heads_of_bias: int, sized: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 2, 7, 4).unbind(0)
    bias = torch.randn(batch_of_bias, heads_of_bias, 7, 7)
    sizes = torch.randint(1, 5, (3, 7)).float() if sized else None
    logits = q @ k.transpose(-2, -1) / 2 + bias
    logits = logits if sizes is None else logits + sizes.log()[:, None, None]
    weights = logits.softmax(dim=-1)
    torch.testing.assert_close(proportional_attention(q, k, v, sizes, bias=bias), weights @ v)
    torch.testing.assert_close(class_attention(q, k, sizes, bias=bias), weights[:, :, 0])
    torch.testing.assert_close(attention_received(q, k, sizes, bias=bias), weights.sum(dim=(1, 2)))
    attended, received = attention_with_received(q, k, v, sizes, bias=bias)
    torch.testing.assert_close(attended, weights @ v)
    torch.testing.assert_close(received, weights.sum(dim=(1, 2)))
    if not sized:
        everybody = policy_attention(q, k, v, torch.ones(3, 7), bias=bias, eps=0.0)
        torch.testing.assert_close(everybody, weights @ v)
