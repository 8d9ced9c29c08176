"""Deformable attention: against a loop over its definition, and against transformers' own with the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agglo.detection.model.deformable_attention import DeformableAttention, cell_centres

SHAPES = [(5, 7), (3, 4), (1, 2)]


def lively(width: int, heads: int, levels: int, points: int, seed: int = 0) -> DeformableAttention:
    torch.manual_seed(seed)
    attention = DeformableAttention(width, heads=heads, levels=levels, points=points)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return attention


def bilinear(picture: Tensor, x: float, y: float) -> Tensor:
    """Of picture (h, w, d) at pixel coordinates, cell centres at whole numbers; zero outside."""
    height, width, channels = picture.shape
    total = torch.zeros(channels, dtype=picture.dtype)
    left, top = math.floor(x), math.floor(y)
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < height and 0 <= column < width:
                total += (1 - abs(x - column)) * (1 - abs(y - row)) * picture[row, column]
    return total


def by_definition(attention: DeformableAttention, queries: Tensor, places: Tensor, maps: Tensor, shapes: Any) -> Tensor:
    a = attention
    batch, n_queries, width = queries.shape
    each = width // a.heads
    out = torch.zeros(batch, n_queries, width, dtype=queries.dtype)
    for image in range(batch):
        values = a.value(maps[image])
        for q in range(n_queries):
            offsets = a.offsets(queries[image, q]).view(a.heads, a.levels, a.points, 2)
            weights = a.weights(queries[image, q]).view(a.heads, a.levels * a.points).softmax(-1)
            for head in range(a.heads):
                start = 0
                for level, (height, columns) in enumerate(shapes):
                    picture = values[start : start + height * columns, head * each : (head + 1) * each]
                    picture = picture.view(height, columns, each)
                    start += height * columns
                    for point in range(a.points):
                        x, y = (places[q] * torch.tensor([columns, height]) + offsets[head, level, point]).tolist()
                        weight = weights[head, level * a.points + point]
                        out[image, q, head * each : (head + 1) * each] += weight * bilinear(picture, x - 0.5, y - 0.5)
    return a.out(out)


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 2, 3]),
    points=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_it_is_what_the_definition_says(shapes: list[tuple[int, int]], heads: int, points: int, seed: int) -> None:
    attention = lively(6, heads, len(shapes), points, seed)
    queries, maps = torch.randn(2, 3, 6), torch.randn(2, sum(h * w for h, w in shapes), 6)
    places = torch.rand(3, 2)
    torch.testing.assert_close(
        attention(queries, places, maps, shapes),
        by_definition(attention, queries, places, maps, shapes),
        rtol=1e-4,
        atol=1e-5,
    )


@torch.no_grad()
def test_it_is_transformers_to_the_bit() -> None:
    library = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    config = pytest.importorskip("transformers").DeformableDetrConfig(
        d_model=24, num_feature_levels=3, disable_custom_kernels=True
    )
    attention = lively(24, heads=6, levels=3, points=4)
    theirs = library.DeformableDetrMultiscaleDeformableAttention(config, num_heads=6, n_points=4)
    names = {"sampling_offsets": "offsets", "attention_weights": "weights", "value_proj": "value", "output_proj": "out"}
    for their_name, name in names.items():
        getattr(theirs, their_name).load_state_dict(getattr(attention, name).state_dict())
    n_values = sum(h * w for h, w in SHAPES)
    queries, maps, places = torch.randn(2, 35, 24), torch.randn(2, n_values, 24), cell_centres([(5, 7)])
    expected, _ = theirs(
        hidden_states=queries,
        encoder_hidden_states=maps,
        reference_points=places[None, :, None].expand(2, -1, 3, -1),
        spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES,
        level_start_index=torch.tensor([0, 35, 47]),
    )
    assert torch.equal(attention(queries, places, maps, SHAPES), expected)


def test_it_begins_as_released() -> None:
    attention = DeformableAttention(24, heads=6, levels=3, points=4)
    offsets = attention.offsets.bias.view(6, 3, 4, 2)
    for head in range(6):
        angle = 2 * math.pi * head / 6
        direction = torch.tensor([math.cos(angle), math.sin(angle)])
        direction = direction / direction.abs().max()
        for point in range(4):
            torch.testing.assert_close(offsets[head, :, point], (direction * (point + 1)).expand(3, 2))
    for zero in (attention.offsets.weight, attention.weights.weight, attention.weights.bias, attention.out.bias):
        assert not zero.any()
    bound = math.sqrt(6 / 48)  # Xavier's for 24 x 24
    for uniform in (attention.value.weight, attention.out.weight):
        assert 0.9 * bound < float(uniform.detach().abs().max()) <= bound


@torch.no_grad()
def test_it_is_computed_in_float32_under_autocast() -> None:
    attention = lively(24, heads=6, levels=3, points=4)
    queries, maps, places = torch.randn(1, 9, 24), torch.randn(1, 49, 24), torch.rand(9, 2)
    expected = attention(queries, places, maps, SHAPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(queries, places, maps, SHAPES), expected)


@torch.no_grad()
def test_half_precision_weights_sample_in_float32() -> None:
    attention = lively(24, heads=6, levels=3, points=4)
    queries, maps, places = torch.randn(1, 9, 24), torch.randn(1, 49, 24), torch.rand(9, 2)
    expected = attention(queries, places, maps, SHAPES)
    found = attention.bfloat16()(queries.bfloat16(), places, maps.bfloat16(), SHAPES)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.15)


def test_centres() -> None:
    expected = [[(column + 0.5) / 3, (row + 0.5) / 2] for row in range(2) for column in range(3)] + [[0.5, 0.5]]
    torch.testing.assert_close(cell_centres([(2, 3), (1, 1)]), torch.tensor(expected))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="heads=5 do not divide the width 24"):
        DeformableAttention(24, heads=5, levels=1, points=1)
    attention = DeformableAttention(24, heads=6, levels=3, points=4)
    with pytest.raises(ValueError, match="do not fit 48 values"):
        attention(torch.randn(1, 2, 24), torch.rand(2, 2), torch.randn(1, 48, 24), SHAPES)
    with pytest.raises(ValueError, match="needed: 3 maps"):
        attention(torch.randn(1, 2, 24), torch.rand(2, 2), torch.randn(1, 35, 24), SHAPES[:1])
