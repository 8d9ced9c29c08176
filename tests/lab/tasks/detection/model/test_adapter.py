"""The dense ViT-Adapter: its maps, its parameters, its start, and the plain ViTs it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agglo.hosts import UnsupportedModelError
from agglo.lab.tasks.detection.model.adapter import ViTAdapter, real_patches
from agglo.lab.tasks.detection.model.adapter_layers import cell_centres
from agglo.lab.tasks.detection.model.vit import plain_vit
from tests.support.adapters import WIDTH, small_adapter, small_vit


@pytest.mark.parametrize(("patch", "size"), [(4, (64, 64)), (8, (16, 16)), (16, (64, 96))])
@torch.no_grad()
def test_four_maps_of_any_size(patch: int, size: tuple[int, int]) -> None:
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
    adapter = ViTAdapter(plain_vit("tiny"), drop_path=0.1)
    for interaction in adapter.interactions:
        assert not interaction.injector.gamma.any()
        for extractor in interaction.extractors:
            assert extractor.drop_path.drop_prob == 0.1
            assert float(extractor.ffn.enter.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
            assert not extractor.ffn.enter.bias.any()
            fan_out = 9  # depthwise
            std = float(extractor.ffn.convolution.weight.detach().std())
            assert std == pytest.approx(math.sqrt(2 / fan_out), rel=0.15)
            assert not extractor.attention.weights.weight.any() and extractor.attention.offsets.bias.any()
    for convolution in (m for m in adapter.prior.modules() if isinstance(m, nn.Conv2d)):
        fan_out = math.prod(convolution.kernel_size) * convolution.out_channels
        assert float(convolution.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
    assert float(adapter.up.weight.detach().std()) == pytest.approx(math.sqrt(2 / (4 * 192)), rel=0.05)
    assert float(adapter.level_embedding.detach().std()) == pytest.approx(1, rel=0.1)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in adapter.vit.blocks]  # type: ignore[union-attr]
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


def rotary_vit(**options: Any) -> nn.Module:
    eva = pytest.importorskip("timm.models.eva")
    return eva.Eva(  # type: ignore[no-any-return]
        img_size=64,
        patch_size=8,
        embed_dim=48,
        depth=8,
        num_heads=3,
        num_classes=5,
        num_reg_tokens=2,
        use_rot_pos_emb=True,
        ref_feat_shape=(8, 8),
        init_values=0.1,
        **{"dynamic_img_size": True, **options},
    )


@pytest.mark.parametrize(
    "make",
    [lambda: small_vit(reg_tokens=2), lambda: small_vit(init_values=0.1, no_embed_class=True), rotary_vit],
    ids=["registers", "layer scale", "rotary"],
)
@pytest.mark.parametrize("class_token", [False, True])
@torch.no_grad()
def test_other_plain_vits(make: Any, class_token: bool) -> None:
    adapter = small_adapter(make(), class_token=class_token, deform_heads=3)
    images = torch.randn(1, 3, 48, 80)
    maps = adapter(images)
    assert [tuple(m.shape[-2:]) for m in maps] == [(24, 40), (12, 20), (6, 10), (3, 5)]
    state = adapter.begin(images)
    assert state.embedded.tokens.shape[1] == adapter.prefix + 60
    assert (state.embedded.rope is not None) == (type(adapter.vit).__name__ == "Eva")


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


def test_which_patches_are_real() -> None:
    assert real_patches(None, (4, 6), 8) is None
    assert real_patches([(32, 48), (25, 41)], (4, 6), 8) is None  # every patch shows something
    real = real_patches([(32, 48), (24, 41), (1, 1)], (4, 6), 8)
    assert real is not None
    grids = real.view(3, 4, 6)
    assert grids[0].all()
    assert torch.equal(grids[1], torch.tensor([[True] * 6] * 3 + [[False] * 6]))
    assert grids[2].nonzero().tolist() == [[0, 0]]


def test_bad_requests() -> None:
    for options, complaint in (
        ({"interactions": 3}, "interactions=3"),
        ({"padding": "ignore"}, "padding='ignore'"),
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
