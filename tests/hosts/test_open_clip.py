"""open_clip's vision towers: the contract for every kind, whole CLIP models, and ATC against the timm host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.testing import HostContract, TakenApart, assert_same

open_clip = pytest.importorskip("open_clip")
from open_clip.transformer import QuickGELU, Transformer, VisionTransformer  # noqa: E402

SMALL = {
    "image_size": 64,
    "patch_size": 8,
    "width": 48,
    "layers": 8,
    "heads": 4,
    "mlp_ratio": 2.0,
    "output_dim": 24,
}
IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
TEXT = torch.arange(1, 17).reshape(2, 8)


def tower(**options: Any) -> Any:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, **options}).eval()


class TestPlain(HostContract):
    def model(self) -> nn.Module:
        return tower()


class TestOpenAI(HostContract):
    """Quick GELU, and sequences before batches, as open_clip ran its blocks until 2.24."""

    def model(self) -> nn.Module:
        model = tower(act_layer=QuickGELU)
        model.transformer = Transformer(48, 8, 4, 2.0, act_layer=QuickGELU, batch_first=False)
        return model


class TestLayerScaleAndMeanPooling(HostContract):
    def model(self) -> nn.Module:
        return tower(ls_init_value=0.3, pool_type="avg", final_ln_after_pool=True, no_ln_pre=True)


class TestTokensAndPatchDropout(HostContract):
    def model(self) -> nn.Module:
        return tower(output_tokens=True, patch_dropout=0.5, pos_embed_type="sin_cos_2d")


class TestAttentionPooling(HostContract):
    def model(self) -> nn.Module:
        return tower(attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=4, output_tokens=True)


class TestCustomBlocks(HostContract):
    def model(self) -> nn.Module:
        flags = ("qk_norm", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
        return tower(**dict.fromkeys(flags, True), ls_init_value=0.3)


VISION = {"image_size": 64, "patch_size": 8, "width": 48, "head_width": 12, "layers": 8, "mlp_ratio": 2.0}
WORDS = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2}


def clip(kind: str = "CLIP", vision: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    return getattr(open_clip, kind)(embed_dim=24, vision_cfg={**(vision or VISION)}, text_cfg={**WORDS}).eval()


class TestCLIP(HostContract):
    def model(self) -> nn.Module:
        return clip()

    def run(self, model: Any, x: Tensor) -> Any:
        return model.encode_image(x, normalize=True)


def timm_trunk(name: str, **options: Any) -> dict[str, Any]:
    return {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": 224, **options}


class TestTimmTower(TestCLIP):
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


@pytest.mark.parametrize("kind", ["CLIP", "CustomTextCLIP"])
@torch.no_grad()
def test_text_is_left_alone(kind: str) -> None:
    model = clip(kind)
    image, text, _ = model(IMAGE, TEXT)
    agglo.apply(model, keep_rate=0.5)
    reduced_image, reduced_text, _ = model(IMAGE, TEXT)
    assert_same(reduced_text, text)
    assert not torch.allclose(reduced_image, image)


@torch.no_grad()
def test_coca_generates_from_every_token() -> None:
    torch.manual_seed(0)
    model = open_clip.CoCa(
        embed_dim=16,
        multimodal_cfg={**WORDS, "mlp_ratio": 2},
        text_cfg={**WORDS, "embed_cls": True, "output_tokens": True},
        vision_cfg={**VISION, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
    ).eval()
    for parameter in model.parameters():  # open_clip leaves one of them as it was in memory
        nn.init.normal_(parameter, std=0.2)
    dense = model(IMAGE, TEXT)
    assert_same(agglo.apply(model, TakenApart(), schedule=[1])(IMAGE, TEXT), dense, atol=1e-5)
    reduced = agglo.apply(model, keep_rate=0.5)(IMAGE, TEXT)
    assert {name: t.shape for name, t in reduced.items()} == {name: t.shape for name, t in dense.items()}
    assert not torch.allclose(reduced["logits"], dense["logits"])


@pytest.mark.parametrize("options", [{}, {"normalize_intermediates": True, "output_fmt": "NLC"}], ids=str)
@torch.no_grad()
def test_forward_intermediates(options: dict[str, Any]) -> None:
    model = tower()
    arguments = {"indices": [2, 5, 7], "output_extra_tokens": True, **options}
    dense = model.forward_intermediates(IMAGE, **arguments)
    agglo.apply(model, TakenApart(), schedule=[1])
    assert_same(model.forward_intermediates(IMAGE, **arguments), dense, atol=1e-5)
    agglo.apply(model, keep_rate=0.5)
    reduced = model.forward_intermediates(IMAGE, **arguments)
    assert [t.shape for t in reduced["image_intermediates"]] == [t.shape for t in dense["image_intermediates"]]
    assert_same(reduced["image_features"], model(IMAGE))
    early = model.forward_intermediates(IMAGE, indices=[2], stop_early=True, intermediates_only=True)
    assert early["image_intermediates"][0].shape == (2, 48, 8, 8)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = agglo.apply(clip(), keep_rate=0.5).train()
        model.set_grad_checkpointing(checkpointing)
        model.encode_image(IMAGE).square().sum().backward()
        gradients.append([p.grad for p in model.visual.parameters()])
    assert_same(gradients[1], gradients[0], atol=1e-5)


@torch.no_grad()
def test_compiles_as_one_graph() -> None:
    model = agglo.apply(tower(), keep_rate=0.5)
    expected = model(IMAGE)
    torch._dynamo.reset()
    assert_same(torch.compile(model, fullgraph=True, backend="aot_eager")(IMAGE), expected, atol=1e-5)


def as_timm(model: Any, activation: type[nn.Module]) -> nn.Module:
    """A timm VisionTransformer with the weights of an open_clip tower, head included."""
    timm_vit = pytest.importorskip("timm.models.vision_transformer")
    twin = timm_vit.VisionTransformer(
        img_size=64,
        patch_size=8,
        embed_dim=48,
        depth=len(model.transformer.resblocks),
        num_heads=4,
        mlp_ratio=2.0,
        num_classes=24,
        pre_norm=True,
        act_layer=activation,
        norm_layer=nn.LayerNorm,
    )
    renamed = {}
    for name, value in model.state_dict().items():
        for theirs, ours in (
            ("class_embedding", "cls_token"),
            ("positional_embedding", "pos_embed"),
            ("conv1", "patch_embed.proj"),
            ("ln_pre", "norm_pre"),
            ("ln_post", "norm"),
            ("transformer.resblocks", "blocks"),
            ("ln_1", "norm1"),
            ("ln_2", "norm2"),
            ("in_proj_", "qkv."),
            ("out_proj", "proj"),
            ("mlp.c_fc", "mlp.fc1"),
            ("mlp.c_proj", "mlp.fc2"),
        ):
            name = name.replace(theirs, ours)
        renamed[name] = value.reshape(1, -1, 48) if name in ("cls_token", "pos_embed") else value
    renamed["head.weight"], renamed["head.bias"] = renamed.pop("proj").T, torch.zeros(24)
    twin.load_state_dict(renamed, strict=True)
    return twin.eval()


@pytest.mark.parametrize(
    ("request_", "activation"),
    [({"keep_rate": 0.25, "linkage": "complete"}, nn.GELU), ({"threshold": 0.1}, QuickGELU)],
)
@torch.no_grad()
def test_equals_the_timm_host_on_the_same_weights(request_: dict[str, Any], activation: type[nn.Module]) -> None:
    model = tower(layers=12, act_layer=activation)
    twin = as_timm(model, activation)
    dense = model(IMAGE)
    assert_same(dense, twin(IMAGE), atol=1e-4)
    agglo.apply(model, **request_)
    agglo.apply(twin, **request_)
    with agglo.trace(model) as trace, agglo.trace(twin) as twin_trace:
        features = model(IMAGE)
        assert_same(features, twin(IMAGE), atol=1e-4)
    assert not torch.allclose(features, dense, atol=1e-3)
    for block, grouping in trace.groupings.items():
        assert torch.equal(grouping.labels, twin_trace.groupings[block].labels)


def test_flops_of_vit_b_16() -> None:
    with torch.device("meta"):
        model = open_clip.model.CLIP(512, open_clip.model.CLIPVisionCfg(), open_clip.model.CLIPTextCfg(layers=1))
    report = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report is not None
    assert report.gflops_before == pytest.approx(17.56, abs=0.02)  # a ViT-B/16 at 224
    assert report.counts == [196] * 3 + [98] * 3 + [49] * 3 + [24] * 3


def test_a_convolutional_tower_is_refused_by_name() -> None:
    model = clip(vision={"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8})
    with pytest.raises(agglo.UnsupportedModelError, match=r"ModifiedResNet .* in CLIP.*open_clip.VisionTransformer"):
        agglo.apply(model, keep_rate=0.5)
    trunk = clip("CustomTextCLIP", timm_trunk("resnet18", timm_pool="avg"))
    with pytest.raises(agglo.UnsupportedModelError, match=r"ResNet \(from timm.*in CustomTextCLIP"):
        agglo.apply(trunk, keep_rate=0.5)


class OwnBlock(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class OwnTransformer(Transformer):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, attn_mask) * 2


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    with pytest.raises(agglo.UnsupportedModelError, match="scaled cosines"):
        agglo.apply(tower(scaled_cosine_attn=True), keep_rate=0.5)
    model = tower()
    model.transformer.resblocks[3] = OwnBlock(model.transformer.resblocks[3])
    with pytest.raises(agglo.UnsupportedModelError, match="OwnBlock"):
        agglo.apply(model, keep_rate=0.5)
    model = tower()
    model.transformer.__class__ = OwnTransformer
    with pytest.raises(agglo.UnsupportedModelError, match="OwnTransformer replaces forward of open_clip"):
        agglo.apply(model, keep_rate=0.5)
