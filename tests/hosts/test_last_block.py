"""last_block="class_token": the last block computes only what the head reads, with the same output."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agglo
from agglo.methods.soft import PatchMerger
from agglo.testing import assert_same, tensors
from tests.support.class_heads import (
    MODELS,
    ONE_OF_EACH,
    Builder,
    build,
    counted_flops,
    open_clip_tower,
    timm_model,
    transformers_model,
)

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
every_model = pytest.mark.parametrize("name", MODELS)
every_host = pytest.mark.parametrize("name", ONE_OF_EACH)


REQUESTS: dict[str, dict[str, Any]] = {
    "at the last block too": {"keep_rate": 0.6, "blocks": (1, 3)},
    "threshold": {"threshold": 0.3, "blocks": (1, 3)},
    "before blocks": {"keep_rate": 0.6, "blocks": (1, 3), "place": "before_block", "features": "tokens"},
    "pruned": {"method": "topk", "keep_rate": 0.6, "blocks": (1, 3)},
    "passing by": {"method": "evovit", "keep_rate": 0.6, "blocks": (1, 3)},
}


@every_model
@torch.no_grad()
def test_the_output_is_the_same(name: str) -> None:
    model = build(name)
    for request in REQUESTS.values():
        whole = agglo.apply(model, **request)(IMAGE)
        assert_same(agglo.apply(model, **request, last_block="class_token")(IMAGE), whole, atol=2e-5)


@pytest.mark.parametrize("request_", ["at the last block too", "before blocks"])
@every_host
def test_what_is_reported_to_be_spared_does_not_run(name: str, request_: str) -> None:
    model, ran, reported = build(name), [], []
    for last_block in ("all", "class_token"):
        agglo.apply(model, **REQUESTS[request_], last_block=last_block)
        report: Any = agglo.report(model)
        assert report.config.last_block == last_block
        ran.append(counted_flops(model, IMAGE))
        reported.append(2e9 * report.gflops_after)
    assert ran[1] < ran[0]
    # A method that is not asked at the last block has no products of its own there either: at most of all pairs.
    own = 2 * 16 * 16 * 48 if request_ == "at the last block too" else 0
    beyond = ran[0] - ran[1] - (reported[0] - reported[1])
    assert -1 < beyond < own + 1


def features_of(name: str, model: Any) -> Any:
    """Everything that a model gives of its patches."""
    tokens = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(1))
    if name == "timm":
        return model.forward_features(IMAGE), model.forward_intermediates(IMAGE), model.get_intermediate_layers(IMAGE)
    if name == "torchvision":
        return model.encoder(tokens)
    if name == "transformers":
        return model.vit(IMAGE), model(IMAGE, output_hidden_states=True), model(IMAGE, output_hidden_states=[3])
    everything = model.forward_intermediates(IMAGE, indices=[1, 3], output_extra_tokens=True)
    return model.transformer(tokens), everything


@every_host
@torch.no_grad()
def test_features_are_those_of_all_patches(name: str) -> None:
    model = build(name)
    whole = features_of(name, agglo.apply(model, keep_rate=0.5))
    assert_same(features_of(name, agglo.apply(model, keep_rate=0.5, last_block="class_token")), whole, atol=1e-6)


SEE_PATCHES = {
    "timm": ("blocks.3.mlp", "blocks.3.norm1", "norm"),
    "torchvision": ("encoder", "encoder.ln", "encoder.layers.encoder_layer_3.mlp"),
    "transformers": ("vit", "vit.layernorm", "vit.layers.3.layernorm_before"),
    "open_clip": ("transformer", "ln_post", "transformer.resblocks.3.mlp"),
}


def seen_by_hook(model: nn.Module, module: nn.Module) -> list[Tensor]:
    outputs: list[Any] = []
    handle = module.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    model(IMAGE)
    handle.remove()
    return tensors(outputs)


@every_host
@torch.no_grad()
def test_hooks_see_all_patches(name: str) -> None:
    model, seen = build(name), []
    for last_block in ("all", "class_token"):
        agglo.apply(model, keep_rate=0.5, last_block=last_block)
        seen.append([seen_by_hook(model, model.get_submodule(path)) for path in SEE_PATCHES[name]])
    assert all(outputs[0].shape[1] > 1 for outputs in seen[0])
    assert_same(seen[1], seen[0], atol=1e-6)


@every_host
@torch.no_grad()
def test_traces_hear_of_every_reduction(name: str) -> None:
    model, heard = build(name), []
    for last_block in ("all", "class_token"):
        agglo.apply(model, **REQUESTS["at the last block too"], last_block=last_block)
        with agglo.trace(model) as trace:
            output = model(IMAGE)
        assert_same(output, model(IMAGE), atol=2e-5)
        heard.append(trace.groupings)
    assert heard[0].keys() == heard[1].keys()
    for block, grouping in heard[0].items():
        assert torch.equal(grouping.labels, heard[1][block].labels)


class Learned(PatchMerger):
    """Acts after the attention of the last block, where it has a say in the class token."""

    place = "after_attention"


@torch.no_grad()
def test_a_method_that_learns_is_asked_at_the_last_block() -> None:
    reports, outputs, model = [], [], build("timm")
    method = Learned()
    for last_block in ("all", "class_token"):
        agglo.apply(model, method, keep_rate=0.5, blocks=(1, 3), last_block=last_block)
        reports.append(agglo.report(model))
        outputs.append(model(IMAGE))
    assert_same(outputs[1], outputs[0])
    assert reports[0].gflops_after == reports[1].gflops_after  # type: ignore[union-attr]


@every_host
def test_gradients_are_the_same(name: str) -> None:
    gradients = []
    for last_block in ("all", "class_token"):
        model = agglo.apply(build(name), keep_rate=0.5, last_block=last_block).train()
        tensors(model(IMAGE))[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "blocks"), [("torchvision", "encoder.layers"), ("transformers", "vit.layers")])
@torch.no_grad()
def test_compiles_as_one_graph(name: str, blocks: str) -> None:
    model = build(name)
    del model.get_submodule(blocks)[2:]
    agglo.apply(model, "tome", keep_rate=0.5, blocks=(0,), last_block="class_token")
    expected = model(IMAGE)
    torch._dynamo.reset()
    assert_same(torch.compile(model, fullgraph=True, backend="eager")(IMAGE), expected, atol=1e-5)


@every_host
@torch.no_grad()
def test_copies_and_removal(name: str) -> None:
    model = build(name)
    dense, types = model(IMAGE), [type(module) for module in model.modules()]
    attributes = [sorted(module.__dict__) for module in model.modules()]
    keys, parameters = list(model.state_dict()), list(inspect.signature(model.forward).parameters)
    agglo.apply(model, keep_rate=0.5, last_block="class_token")
    assert list(inspect.signature(model.forward).parameters) == parameters
    assert list(model.state_dict()) == keys
    expected = model(IMAGE)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin(IMAGE), expected)
        assert agglo.report(twin).config.last_block == "class_token"  # type: ignore[union-attr]
    dropping = counted_flops(model, IMAGE)
    agglo.apply(model, keep_rate=0.5)
    assert counted_flops(model, IMAGE) > dropping
    agglo.apply(model, keep_rate=0.5, last_block="class_token")
    assert_same(agglo.remove(model)(IMAGE), dense)
    assert [type(module) for module in model.modules()] == types
    assert [sorted(module.__dict__) for module in model.modules()] == attributes


def test_a_timm_head_may_change_later() -> None:
    model = agglo.apply(build("timm"), keep_rate=0.5, last_block="class_token")
    model.reset_classifier(5, global_pool="avg")
    expected = agglo.apply(copy.deepcopy(model), keep_rate=0.5)(IMAGE)
    assert_same(model(IMAGE), expected, atol=1e-6)


REFUSED: list[tuple[Builder, str]] = [
    (lambda: timm_model(global_pool="avg"), "global_pool='avg'"),
    (lambda: transformers_model("ViTModel"), "ViTModel by itself gives its patches"),
    (lambda: open_clip_tower(pool_type="avg"), "pool_type='avg'"),
    (lambda: open_clip_tower(attentional_pool=True, attn_pooler_heads=7), "attn_pool"),
    (lambda: own_forward(), "Own has a forward of its own in place of that of torchvision"),
    (lambda: own_head(), "Own has a forward_head of its own in place of that of timm"),
]


def own_forward() -> nn.Module:
    models = pytest.importorskip("torchvision.models.vision_transformer")

    class Own(models.VisionTransformer):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.encoder(torch.zeros(len(x), 17, 48)).mean(1)
            return out

    return Own(32, 8, 4, 3, 48, 96, num_classes=7)


def own_head() -> nn.Module:
    vit = pytest.importorskip("timm.models.vision_transformer")

    class Own(vit.VisionTransformer):  # type: ignore[misc]
        def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
            return x.mean(1)

    return Own(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=7)


@pytest.mark.parametrize(("builder", "reason"), REFUSED)
def test_heads_that_read_patches_are_refused(builder: Builder, reason: str) -> None:
    model = builder().eval()
    types = [type(module) for module in model.modules()]
    with pytest.raises(agglo.UnsupportedModelError, match=reason):
        agglo.apply(model, keep_rate=0.5, last_block="class_token")
    assert [type(module) for module in model.modules()] == types


@torch.no_grad()
def test_a_head_of_ones_own_gets_every_patch() -> None:
    model = own_head().eval()
    reduced = agglo.apply(model, keep_rate=0.5)
    assert_same(reduced(IMAGE), reduced.forward_features(IMAGE).mean(1), atol=1e-6)
