"""timm's vision transformers: the contract for every family, timm's own extras, and ATC against scikit-learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.testing import HostContract, TakenApart, assert_same
from tests.support.data import data_path
from tests.support.reductions import sklearn_atc_logits

timm = pytest.importorskip("timm")
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import ResPostBlock, VisionTransformer  # noqa: E402

SMALL = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 8, "num_heads": 3, "num_classes": 10}


class TestDeiT(HostContract):
    def model(self) -> nn.Module:
        return VisionTransformer(**SMALL)


class TestPostNorm(HostContract):
    def model(self) -> nn.Module:
        return VisionTransformer(**SMALL, block_fn=ResPostBlock, init_values=0.5)


class TestMixedRotary(HostContract):
    def model(self) -> nn.Module:
        return Eva(**SMALL, attn_type="rope", use_rot_pos_emb=True, rope_type="mixed", init_values=0.1)


def deit(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, **options}).eval()


IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_forward_features_are_full_length_and_members_share_a_value() -> None:
    model = agglo.apply(deit(), keep_rate=0.25)
    with agglo.trace(model) as trace:
        features = model.forward_features(IMAGE)
    assert features.shape == (2, 65, 48)
    grouping = trace.groupings[6]
    for image in range(2):
        for group in range(grouping.n_groups):
            members = features[image, grouping.labels[image] == group]
            assert torch.equal(members, members[:1].expand_as(members))
    assert_same(model.forward_head(features), model(IMAGE), atol=1e-6)


@pytest.mark.parametrize("build", [deit, lambda: Eva(**SMALL, use_rot_pos_emb=True).eval()])
@torch.no_grad()
def test_forward_intermediates(build: Any) -> None:
    model = build()
    arguments = {"indices": [2, 5, 7], "return_prefix_tokens": True, "norm": True}
    dense = model.forward_intermediates(IMAGE, **arguments)
    assert_same(agglo.apply(model, keep_rate=1.0).forward_intermediates(IMAGE, **arguments), dense, atol=1e-5)
    assert_same(
        agglo.apply(model, TakenApart(), schedule=[1]).forward_intermediates(IMAGE, **arguments), dense, atol=1e-5
    )
    agglo.apply(model, keep_rate=0.5)
    final, reduced = model.forward_intermediates(IMAGE, **arguments)
    assert [t.shape for pair in reduced for t in pair] == [t.shape for pair in dense[1] for t in pair]
    assert_same(final, model.forward_features(IMAGE))
    early = model.forward_intermediates(IMAGE, indices=[2], stop_early=True, intermediates_only=True, output_fmt="NLC")
    assert early[0].shape == (2, 64, 48)


@pytest.mark.parametrize(
    "model", [deit(dynamic_img_size=True), Eva(**SMALL, dynamic_img_size=True, use_rot_pos_emb=True)]
)
@torch.no_grad()
def test_dynamic_image_size(model: Any) -> None:
    model.eval()
    wide = torch.randn(2, 3, 48, 80)
    dense = model(wide)
    assert_same(agglo.apply(model, TakenApart(), schedule=[1])(wide), dense, atol=1e-5)
    agglo.apply(model, keep_rate=0.5)
    with agglo.trace(model) as trace:
        model(wide)
    assert [g.n_groups for g in trace.groupings.values()] == [1 + 30, 1 + 15, 1 + 7]


@torch.no_grad()
def test_compiles_as_one_graph() -> None:
    model = agglo.apply(deit(depth=2), keep_rate=0.5, blocks=(0,))
    expected = model(IMAGE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(IMAGE), expected, atol=1e-5)


@torch.no_grad()
def test_wrappers() -> None:
    model = deit()
    wrapped = nn.DataParallel(model)
    assert agglo.apply(wrapped, keep_rate=0.5) is wrapped
    assert agglo.report(wrapped) == agglo.report(model) is not None
    assert_same(wrapped(IMAGE), model(IMAGE))
    assert agglo.report(agglo.remove(wrapped)) is None


class LowRank(nn.Module):
    """An adapter around a linear layer, as PEFT makes them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def test_adapters_on_linear_layers_run_and_learn() -> None:
    model = deit()
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
    dense = model(IMAGE)
    assert_same(agglo.apply(model, TakenApart(), schedule=[1])(IMAGE), dense, atol=1e-5)
    agglo.apply(model, keep_rate=0.5)(IMAGE).square().sum().backward()
    assert all(block.attn.qkv.up.weight.grad.abs().max() > 0 for block in model.blocks)


def test_a_tower_can_be_chosen() -> None:
    pair = nn.ModuleDict({"left": deit(), "right": deit()})
    with pytest.raises(ValueError, match=r"'left'.*'right'.*tower="):
        agglo.apply(pair, keep_rate=0.5)
    agglo.apply(pair, keep_rate=0.5, tower="right")
    assert agglo.report(pair["left"]) is None
    assert agglo.report(pair["right"]) is not None
    agglo.apply(pair, keep_rate=0.5, tower=pair["left"])
    assert agglo.report(pair["left"]) is not None


def test_blocks_that_cannot_be_taken_apart_are_refused_by_name() -> None:
    from timm.models.vision_transformer import ParallelScalingBlock

    with pytest.raises(agglo.UnsupportedModelError, match="ParallelScalingBlock"):
        agglo.apply(deit(block_fn=ParallelScalingBlock), keep_rate=0.5)
    with pytest.raises(agglo.UnsupportedModelError, match="Block of VisionTransformer"):
        agglo.apply(deit(attn_layer="diff", num_heads=2), keep_rate=0.5)


class OwnForward(VisionTransformer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.forward_features(x)[:, 1:].amax(1)


@torch.no_grad()
def test_a_subclass_keeps_its_forward() -> None:
    model = OwnForward(**SMALL).eval()
    dense = model(IMAGE)
    assert_same(agglo.apply(model, keep_rate=1.0)(IMAGE), dense, atol=1e-6)
    assert agglo.apply(model, keep_rate=0.5)(IMAGE).shape == dense.shape


def test_flops_of_deit_tiny() -> None:
    model = timm.create_model("deit_tiny_patch16_224")
    report: Any = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report.gflops_before == pytest.approx(1.26, abs=0.01)  # as published
    assert report.counts == [196] * 3 + [98] * 3 + [49] * 3 + [24] * 3
    assert "196 -> 24" in str(report)


@pytest.mark.parametrize("linkage", ["single", "average", "complete"])
@torch.no_grad()
def test_atc_is_what_scikit_learn_makes_of_a_random_deit(linkage: str) -> None:
    model = deit(depth=12)
    expected = sklearn_atc_logits(model, IMAGE, {3: 32, 6: 16, 9: 8}, linkage)
    assert_same(agglo.apply(model, keep_rate=0.5, linkage=linkage)(IMAGE), expected, atol=1e-4)


@torch.no_grad()
def test_atc_is_what_scikit_learn_makes_of_the_real_deit() -> None:
    weights = data_path("deit_tiny_patch16_224.safetensors")
    images = sorted(data_path("imagenet-val-2k").glob("*/*.jpg"))[:300:100]
    safetensors = pytest.importorskip("safetensors.torch")
    transforms = pytest.importorskip("torchvision.transforms.v2")
    image = pytest.importorskip("PIL.Image")
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(safetensors.load_file(weights), strict=True)
    prepare = transforms.Compose([
        transforms.PILToTensor(),
        transforms.CenterCrop(224),
        transforms.ToDtype(torch.float32, scale=True),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    x = torch.stack([prepare(image.open(path).convert("RGB")) for path in images])
    expected = sklearn_atc_logits(model, x, {3: 49, 6: 12, 9: 3})
    assert_same(agglo.apply(model, keep_rate=0.25)(x), expected, atol=1e-4)
