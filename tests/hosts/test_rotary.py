"""Positions of merged tokens under rotary embeddings."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.grouping import Grouping
from agglo.hosts.common.positions import Positions, rotate_to


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
    placed = Positions((3, 4)).after(grouping, weights).merged
    assert placed is not None
    points = grid_points(3, 4)
    for b in range(2):
        for k in range(3):
            expected = sum(weights[b, k, n] * points[n] for n in range(12)) / weights[b, k].sum()
            torch.testing.assert_close(placed[b, k], expected)
