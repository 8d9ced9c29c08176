"""Deformable attention: against transformers' own with the same weights."""

from __future__ import annotations

import math

import pytest
import torch

from agglo.lab.tasks.detection.model.adapter_layers import DeformableAttention, cell_centres

SHAPES = [(5, 7), (3, 4), (1, 2)]


def lively(width: int, heads: int, levels: int, points: int, seed: int = 0) -> DeformableAttention:
    torch.manual_seed(seed)
    attention = DeformableAttention(width, heads=heads, levels=levels, points=points)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return attention


@pytest.mark.parametrize(("shapes", "heads", "points"), [(SHAPES, 6, 4), ([(4, 3), (2, 5)], 3, 2)])
@torch.no_grad()
def test_it_is_transformers_to_the_bit(shapes: list[tuple[int, int]], heads: int, points: int) -> None:
    library = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    config = pytest.importorskip("transformers").DeformableDetrConfig(
        d_model=24, num_feature_levels=len(shapes), disable_custom_kernels=True
    )
    attention = lively(24, heads=heads, levels=len(shapes), points=points)
    theirs = library.DeformableDetrMultiscaleDeformableAttention(config, num_heads=heads, n_points=points)
    names = {"sampling_offsets": "offsets", "attention_weights": "weights", "value_proj": "value", "output_proj": "out"}
    for their_name, name in names.items():
        getattr(theirs, their_name).load_state_dict(getattr(attention, name).state_dict())
    lengths = [h * w for h, w in shapes]
    queries, maps, positions = torch.randn(2, 35, 24), torch.randn(2, sum(lengths), 24), cell_centres([(5, 7)])
    expected, _ = theirs(
        hidden_states=queries,
        encoder_hidden_states=maps,
        reference_points=positions[None, :, None].expand(2, -1, len(shapes), -1),
        spatial_shapes=torch.tensor(shapes),
        spatial_shapes_list=shapes,
        level_start_index=torch.tensor([0, *lengths[:-1]]).cumsum(0),
    )
    assert torch.equal(attention(queries, positions, maps, shapes), expected)


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
def test_it_samples_in_float32_whatever_the_precision() -> None:
    attention = lively(24, heads=6, levels=3, points=4)
    queries, maps, positions = torch.randn(1, 9, 24), torch.randn(1, 49, 24), torch.rand(9, 2)
    expected = attention(queries, positions, maps, SHAPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(queries, positions, maps, SHAPES), expected)
    found = attention.bfloat16()(queries.bfloat16(), positions, maps.bfloat16(), SHAPES)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.15)
