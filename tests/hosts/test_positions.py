"""Rotary positions and relative position bias of merged tokens, and attention with a bias."""

from __future__ import annotations

from typing import Any

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
from agglo.hosts.common.positions import Positions, RelativeBias, rotate_to


def axial_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Sines then cosines of angles that follow the row in the first half of the channels, the column in the other."""
    angles = torch.cat([positions[..., :1] * frequencies, positions[..., 1:] * frequencies], dim=-1)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def grid_points(rows: int, columns: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9**6))
def test_angles_between_grid_points(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    frequencies = torch.rand(4) * 3  # up to almost half a turn from one patch to the next
    table = axial_table(grid_points(rows, columns), frequencies)
    positions = torch.rand(2, 5, 2) * (torch.tensor([rows, columns]) - 1)
    wanted = axial_table(positions, frequencies).unsqueeze(1)
    torch.testing.assert_close(rotate_to(positions, table, (rows, columns)), wanted, rtol=0, atol=1e-4)


def test_a_merged_token_takes_the_size_weighted_mean_position() -> None:
    frequencies = torch.tensor([1.0, 0.1])
    table = axial_table(grid_points(2, 3), frequencies)
    positions = Positions((2, 3))
    assert positions.table(table) is table
    first = Grouping.of(torch.tensor([[0, 0, 1, 0, 2, 3]]), 4, prefix=1)  # (0,0) (0,1) (1,0) together
    second = Grouping.of(torch.tensor([[0, 0, 1, 2]]), 3, prefix=1, weights=first.sizes)  # and (0,2)
    merged = positions.after(first).after(second)
    position = torch.tensor([[(0 + 0 + 1 + 0) / 4, (0 + 1 + 0 + 2) / 4], [1, 1], [1, 2]]).unsqueeze(0)
    torch.testing.assert_close(merged.merged, position)
    torch.testing.assert_close(merged.table(table), axial_table(position, frequencies).unsqueeze(1), rtol=0, atol=1e-5)


def test_a_soft_token_sits_at_the_mean_of_what_is_in_it() -> None:
    weights = torch.rand(2, 3, 12, generator=torch.Generator().manual_seed(0))
    weights[:, 2] *= 1e-3  # nobody's strongest, and sums far from 1
    grouping = Grouping.of(weights.argmax(dim=1), 3, prefix=1)
    assert (grouping.labels < 3).all()
    placed: Any = Positions((3, 4)).after(grouping, weights).merged
    points = grid_points(3, 4)
    for b in range(2):
        for k in range(3):
            expected = sum(weights[b, k, n] * points[n] for n in range(12)) / weights[b, k].sum()
            torch.testing.assert_close(placed[b, k], expected)


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


def test_softly_mixed_tokens_take_their_shares() -> None:
    table, weights = torch.randn(1, 2, 4, 4), torch.rand(1, 2, 3)
    grouping = Grouping.of(torch.tensor([[0, 1, 1]]), 2, prefix=1)
    bias = RelativeBias().after(grouping, weights).between(table)
    shares = torch.zeros(3, 4)
    shares[0, 0] = 1
    shares[1:, 1:] = weights[0] / weights[0].sum(dim=1, keepdim=True)
    torch.testing.assert_close(bias[0], shares @ table[0] @ shares.T)


@pytest.mark.parametrize(("batch_of_bias", "heads_of_bias", "sized"), [(1, 2, False), (3, 1, True)])
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
        every = policy_attention(q, k, v, torch.ones(3, 7), bias=bias)
        torch.testing.assert_close(every, weights @ v, rtol=1e-4, atol=1e-5)
