"""open_clip's vision towers: the contract for every kind, whole CLIP models, and ATC against the timm host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.testing import HostContract, TakenApart, assert_same
from tests.support.class_heads import CUSTOM, TOWER

open_clip = pytest.importorskip("open_clip")
from open_clip.transformer import QuickGELU, Transformer, VisionTransformer  # noqa: E402

SMALL = {**TOWER, "image_size": 64, "layers": 8, "heads": 4, "output_dim": 24}
IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
TEXT = torch.arange(1, 17).reshape(2, 8)


def tower(**options: Any) -> Any:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, **options}).eval()


class TestOpenAI(HostContract):
    """Quick GELU, and sequences before batches, as open_clip ran its blocks until 2.24."""

    def model(self) -> nn.Module:
        model = tower(act_layer=QuickGELU)
        model.transformer = Transformer(48, 8, 4, 2.0, act_layer=QuickGELU, batch_first=False)
        return model


class TestCustomBlocks(HostContract):
    def model(self) -> nn.Module:
        pooling = {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 4, "output_tokens": True}
        return tower(**CUSTOM, **pooling, ls_init_value=0.3, patch_dropout=0.5)


VISION = {"image_size": 64, "patch_size": 8, "width": 48, "head_width": 12, "layers": 8, "mlp_ratio": 2.0}
WORDS = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2}


def clip(kind: str = "CLIP", vision: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    return getattr(open_clip, kind)(embed_dim=24, vision_cfg={**(vision or VISION)}, text_cfg={**WORDS}).eval()


def timm_trunk(name: str, **options: Any) -> dict[str, Any]:
    return {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": 224, **options}


class TestTimmTower(HostContract):
    """Runs through the timm host."""

    threshold = 0.4

    def model(self) -> nn.Module:
        timm = pytest.importorskip("timm")
        model = clip("CustomTextCLIP", timm_trunk("vit_tiny_patch16_224"))
        model.visual.trunk = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=48, depth=8, num_heads=3, num_classes=0
        )
        model.visual.head = nn.Linear(48, 24)
        return model

    def run(self, model: Any, x: Tensor) -> Any:
        return model.encode_image(x, normalize=True)


@torch.no_grad()
def test_text_is_left_alone() -> None:
    model = clip()
    image, text, _ = model(IMAGE, TEXT)
    agglo.apply(model, keep_rate=0.5)
    reduced_image, reduced_text, _ = model(IMAGE, TEXT)
    assert_same(reduced_text, text)
    assert not torch.allclose(reduced_image, image)


@torch.no_grad()
def test_forward_intermediates() -> None:
    model = tower()
    arguments = {"indices": [2, 5, 7], "output_extra_tokens": True, "normalize_intermediates": True}
    dense = model.forward_intermediates(IMAGE, **arguments)
    agglo.apply(model, TakenApart(), schedule=[1])
    assert_same(model.forward_intermediates(IMAGE, **arguments), dense, atol=1e-5)
    agglo.apply(model, keep_rate=0.5)
    reduced = model.forward_intermediates(IMAGE, **arguments)
    assert [t.shape for t in reduced["image_intermediates"]] == [t.shape for t in dense["image_intermediates"]]
    assert_same(reduced["image_features"], model(IMAGE))
    early = model.forward_intermediates(IMAGE, indices=[2], stop_early=True, intermediates_only=True)
    assert early["image_intermediates"][0].shape == (2, 48, 8, 8)


def test_flops_of_vit_b_16() -> None:
    with torch.device("meta"):
        model = open_clip.model.CLIP(512, open_clip.model.CLIPVisionCfg(), open_clip.model.CLIPTextCfg(layers=1))
    report: Any = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report.gflops_before == pytest.approx(17.56, abs=0.02)  # a ViT-B/16 at 224
    assert report.counts == [196] * 3 + [98] * 3 + [49] * 3 + [24] * 3


def test_a_convolutional_tower_is_refused_by_name() -> None:
    model = clip(vision={"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8})
    with pytest.raises(agglo.UnsupportedModelError, match=r"CLIP .*ModifiedResNet has no attention"):
        agglo.apply(model, keep_rate=0.5)
    trunk = clip("CustomTextCLIP", timm_trunk("resnet18", timm_pool="avg"))
    with pytest.raises(agglo.UnsupportedModelError, match="ResNet has no attention"):
        agglo.apply(trunk, keep_rate=0.5)


def test_what_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(agglo.UnsupportedModelError, match="scaled cosines"):
        agglo.apply(tower(scaled_cosine_attn=True), keep_rate=0.5)
