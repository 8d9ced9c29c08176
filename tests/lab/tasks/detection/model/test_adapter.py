"""The dense ViT-Adapter: its maps, its start, the plain ViTs it takes, and deformable attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agglo.hosts import UnsupportedModelError
from agglo.lab.tasks.detection.model.adapter import DeformableAttention, ViTAdapter, cell_centres
from agglo.lab.tasks.detection.model.vit import plain_vit
from tests.support.adapters import WIDTH, rotary_vit, small_adapter, small_vit


@torch.no_grad()
def test_four_maps_of_any_size() -> None:
    for patch, size in ((4, (64, 64)), (16, (64, 96))):
        adapter = ViTAdapter(small_vit(patch_size=patch), prior_width=4)
        strides = (patch // 4, patch // 2, patch, 2 * patch)
        assert (adapter.strides, adapter.out_channels) == (strides, WIDTH)
        maps = adapter(torch.randn(2, 3, *size))
        assert [tuple(m.shape) for m in maps] == [(2, WIDTH, size[0] // s, size[1] // s) for s in strides]
        with pytest.raises(ValueError, match=f"multiples of {2 * patch}"):
            adapter(torch.randn(1, 3, *size[:1], size[1] + 1))


@torch.no_grad()
def test_the_pass_written_out() -> None:
    """Interaction by interaction from the modules, as the facts describe it."""
    adapter = small_adapter()
    images = torch.randn(2, 3, 64, 96)
    rows, columns = 8, 12
    vit, c = adapter.vit, WIDTH
    positions = vit.pos_embed.transpose(1, 2).view(1, c, 8, 8)
    positions = F.interpolate(positions, size=(rows, columns), mode="bicubic", align_corners=False)
    x = (vit.patch_embed.proj(images) + positions).flatten(2).transpose(1, 2)
    finest, *maps = adapter.prior(images)
    shapes = [(16, 24), (8, 12), (4, 6)]
    pyramid = torch.cat([m.flatten(2).transpose(1, 2) + adapter.level_embedding[i] for i, m in enumerate(maps)], dim=1)
    assert pyramid.shape[1] == 5.25 * rows * columns
    for number, interaction in enumerate(adapter.interactions):
        x = x + interaction.injector(x, (rows, columns), pyramid, shapes)
        for block in vit.blocks[2 * number : 2 * number + 2]:
            x = block(x)
        assert len(interaction.extractors) == (3 if number == 3 else 1)
        for extractor in interaction.extractors:
            pyramid = extractor(pyramid, shapes, x, (rows, columns))
    seen = x.transpose(1, 2).view(2, c, rows, columns)
    two, three, four = (
        part.transpose(1, 2).reshape(2, c, *shape)
        for part, shape in zip(pyramid.split([384, 96, 24], dim=1), shapes, strict=True)
    )
    one = adapter.up(two) + finest
    for expected, factor, norm, found in zip(
        (one, two, three, four), (4, 2, 1, 0.5), adapter.norms, adapter(images), strict=True
    ):
        resized = F.interpolate(seen, scale_factor=factor, mode="bilinear", align_corners=False)
        torch.testing.assert_close(found, norm(expected + resized), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_injector_and_extractor_by_their_formulas() -> None:
    interaction: Any = small_adapter().interactions[0]
    grid, shapes = (4, 6), [(8, 12), (4, 6), (2, 3)]
    x, c = torch.randn(2, 24, WIDTH), torch.randn(2, 126, WIDTH)
    injector, extractor = interaction.injector, interaction.extractors[0]
    found = injector.attention(injector.norm_tokens(x), cell_centres([grid]), injector.norm_pyramid(c), shapes)
    torch.testing.assert_close(injector(x, grid, c, shapes), injector.gamma * found)
    looked = c + extractor.attention(extractor.norm_pyramid(c), cell_centres(shapes), extractor.norm_tokens(x), [grid])
    hidden = extractor.ffn.enter(extractor.norm_ffn(looked))
    maps = [
        F.conv2d(
            part.transpose(1, 2).reshape(2, 6, *shape),
            extractor.ffn.convolution.weight,
            extractor.ffn.convolution.bias,
            padding=1,
            groups=6,
        ).flatten(2)
        for part, shape in zip(hidden.split([96, 24, 6], dim=1), shapes, strict=True)
    ]
    hidden = F.gelu(torch.cat(maps, dim=2).transpose(1, 2))
    torch.testing.assert_close(extractor(c, shapes, x, grid), looked + extractor.ffn.leave(hidden))


def test_how_it_begins() -> None:
    torch.manual_seed(0)
    adapter: Any = ViTAdapter(plain_vit("tiny"), drop_path=0.1)

    def std(weight: torch.Tensor) -> float:
        return float(weight.detach().std())

    for interaction in adapter.interactions:
        assert not interaction.injector.gamma.any()
        for extractor in interaction.extractors:
            assert extractor.drop_path.drop_prob == 0.1 and not extractor.ffn.enter.bias.any()
            assert std(extractor.ffn.enter.weight) == pytest.approx(0.02, rel=0.05)
            assert std(extractor.ffn.convolution.weight) == pytest.approx(math.sqrt(2 / 9), rel=0.15)  # depthwise
            assert not extractor.attention.weights.weight.any() and extractor.attention.offsets.bias.any()
    for convolution in (m for m in adapter.prior.modules() if isinstance(m, nn.Conv2d)):
        fan_out = math.prod(convolution.kernel_size) * convolution.out_channels
        assert std(convolution.weight) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
    assert std(adapter.up.weight) == pytest.approx(math.sqrt(2 / (4 * 192)), rel=0.05)
    assert std(adapter.level_embedding) == pytest.approx(1, rel=0.1)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in adapter.vit.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


def test_the_class_token_goes_with_its_position() -> None:
    vit: Any = small_vit()
    with torch.no_grad():
        vit.cls_token.fill_(1e6)
    patches = vit.pos_embed[:, 1:].clone()
    adapter = ViTAdapter(vit, prior_width=8)
    assert adapter.prefix == 0
    assert torch.equal(adapter.vit.pos_embed, patches)  # type: ignore[arg-type]
    assert not any("cls_token" in name or name == "norm.weight" for name in adapter.vit.state_dict())
    with_token = ViTAdapter(small_vit(), prior_width=8, class_token=True)
    assert with_token.prefix == 1
    with pytest.raises(ValueError, match="class_token=True needs a ViT that has one"):
        ViTAdapter(small_vit(class_token=False, global_pool="avg"), class_token=True)


@pytest.mark.parametrize(
    ("make", "class_token"),
    [(lambda: small_vit(reg_tokens=2), True), (lambda: small_vit(init_values=0.1, no_embed_class=True), False)]
    + [(rotary_vit, token) for token in (False, True)],
    ids=["registers", "layer scale", "rotary", "rotary with class token"],
)
@torch.no_grad()
def test_other_plain_vits(make: Any, class_token: bool) -> None:
    adapter = small_adapter(make(), class_token=class_token, deform_heads=3)
    images = torch.randn(1, 3, 48, 80)
    assert [tuple(m.shape[-2:]) for m in adapter(images)] == [(24, 40), (12, 20), (6, 10), (3, 5)]
    state = adapter.begin(images)
    assert state.embedded.tokens.shape[1] == adapter.prefix + 60
    assert (state.embedded.rope is not None) == (make is rotary_vit)


def test_gradients_reach_everything_and_checkpointing_changes_nothing() -> None:
    adapter = small_adapter().train()
    images = torch.randn(2, 3, 32, 48)
    gradients = []
    for checkpointing in (False, True):
        adapter.vit.set_grad_checkpointing(checkpointing)
        adapter.zero_grad()
        sum(m.pow(2).mean() for m in adapter(images)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())
        gradients.append([p.grad.clone() for p in adapter.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-3, atol=1e-4)


def test_bad_requests() -> None:
    for options, complaint in (
        ({"interactions": 3}, "interactions=3"),
        ({"nominal_size": (64, 60)}, "64 x 60 pixels"),
        ({"deform_heads": 7}, "heads=7"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ViTAdapter(small_vit(), **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="14 x 14 pixels"):
        ViTAdapter(small_vit(img_size=70, patch_size=14))
    with pytest.raises(UnsupportedModelError, match="dynamic_img_size"):
        ViTAdapter(rotary_vit(dynamic_img_size=False))
    with pytest.raises(UnsupportedModelError, match="Linear cannot be the ViT"):
        ViTAdapter(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="size='huge'"):
        plain_vit("huge")


SHAPES = [(5, 7), (3, 4), (1, 2)]


def lively() -> DeformableAttention:
    torch.manual_seed(0)
    attention = DeformableAttention(24, heads=6, levels=3, points=4)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return attention


@torch.no_grad()
def test_deformable_attention_is_transformers_to_the_bit() -> None:
    library = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    config = pytest.importorskip("transformers").DeformableDetrConfig(
        d_model=24, num_feature_levels=3, disable_custom_kernels=True
    )
    attention = lively()
    theirs = library.DeformableDetrMultiscaleDeformableAttention(config, num_heads=6, n_points=4)
    names = {"sampling_offsets": "offsets", "attention_weights": "weights", "value_proj": "value", "output_proj": "out"}
    for their_name, name in names.items():
        getattr(theirs, their_name).load_state_dict(getattr(attention, name).state_dict())
    lengths = [h * w for h, w in SHAPES]
    queries, maps, positions = torch.randn(2, 35, 24), torch.randn(2, sum(lengths), 24), cell_centres([(5, 7)])
    expected, _ = theirs(
        hidden_states=queries,
        encoder_hidden_states=maps,
        reference_points=positions[None, :, None].expand(2, -1, 3, -1),
        spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES,
        level_start_index=torch.tensor([0, *lengths[:-1]]).cumsum(0),
    )
    assert torch.equal(attention(queries, positions, maps, SHAPES), expected)


def test_deformable_attention_begins_as_released() -> None:
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
def test_deformable_attention_samples_in_float32_whatever_the_precision() -> None:
    attention = lively()
    queries, maps, positions = torch.randn(1, 9, 24), torch.randn(1, 49, 24), torch.rand(9, 2)
    expected = attention(queries, positions, maps, SHAPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(queries, positions, maps, SHAPES), expected)
    found = attention.bfloat16()(queries.bfloat16(), positions, maps.bfloat16(), SHAPES)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.15)
