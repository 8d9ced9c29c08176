"""Methods whose tokens pass blocks by, against a slow model: one image, all tokens in a list, every block run by timm
itself on those tokens alone that it is to process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import agglo
from agglo.methods.class_attention import EvoViT
from agglo.methods.dynamic_vit import SViT
from agglo.plan import Plan
from tests.methods.test_contract import applied
from tests.support import reductions
from tests.support.reductions import lively_vit

timm = pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402


def vit(depth: int = 6, **options: Any) -> Any:
    return lively_vit(32, depth, **options)


def images(batch: int = 3) -> Tensor:
    return reductions.images(batch, (32, 32))


Choose = Callable[[int, Tensor], list[int] | None]


def by_hand(model: Any, image: Tensor, choose: Choose, seen: Callable[..., None] = lambda *_: None) -> Tensor:
    """Tokens (T, C) after the last norm. choose(block, tokens) gives the patches to process, None for all of them;
    seen(block, patches, attention) is told how the class token attends, (heads, patches processed)."""
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    for index, block in enumerate(model.blocks):
        patches = choose(index, x)
        patches = list(range(len(x) - 1)) if patches is None else patches
        rows = [0, *(1 + patch for patch in patches)]
        inside = x[rows]
        qkv = block.attn.qkv(block.norm1(inside)).reshape(len(rows), 3, block.attn.num_heads, -1)
        logits = torch.einsum("hd,thd->ht", qkv[0, 0], qkv[:, 1]) / math.sqrt(qkv.shape[-1])
        seen(index, patches, logits.softmax(-1)[:, 1:])
        x = x.clone()
        x[rows] = block(inside[None])[0]
    return model.norm(x)


def svit_by_hand(method: SViT, blocks: list[int]) -> Choose:
    def choose(index: int, x: Tensor) -> list[int] | None:
        if index not in blocks:
            return None
        gate: Any = method.gates[blocks.index(index)]
        processed = []
        for patch, token in enumerate(x[1:]):
            normed = (token - token.mean()) / (token.var(unbiased=False) + 1e-5).sqrt() * gate.norm.weight
            hidden = torch.nn.functional.gelu(gate.decide[0](normed + gate.norm.bias))
            process, skip = gate.decide[2](hidden)
            if process >= skip:
                processed.append(patch)
        return processed

    return choose


def evovit_by_hand(starts: list[int], n_kept: int, per_block: bool) -> tuple[Choose, Callable[..., None]]:
    """As published: a = the latest attention up to the first stage, then half of it and half of what there was."""
    memory: dict[int, float] = {}
    chosen: list[int] = []

    def choose(index: int, x: Tensor) -> list[int] | None:
        nonlocal chosen
        if index < starts[0]:
            return None
        if per_block or index in starts:
            chosen = sorted(memory, key=lambda patch: -memory[patch])[:n_kept]
        return chosen

    def seen(index: int, patches: list[int], attention: Tensor) -> None:
        alpha = 1.0 if index < starts[0] else 0.5
        for patch, latest in zip(patches, attention.sum(0).tolist(), strict=True):
            memory[patch] = latest if index == 0 else (1 - alpha) * memory[patch] + alpha * latest

    return choose, seen


@torch.no_grad()
def test_svit_is_the_slow_model() -> None:
    model, x = vit(), images()
    slow = copy.deepcopy(model)
    applied("svit", {}, model)
    with agglo.trace(model) as trace:
        features, logits = model.forward_features(x), model(x)
    blocks = [step.block for step in trace.steps]
    assert blocks == [1, 2, 3, 4, 5]
    counts = torch.stack([step.total.counts for step in trace.steps if step.total.counts is not None])
    assert (counts.amin(1) < counts.amax(1)).any(), counts  # images differ
    processed = torch.stack([step.total.labels >= 0 for step in trace.steps])
    assert (processed[1:] & ~processed[:-1]).any()  # tokens come back
    for index, image in enumerate(x):
        expected = by_hand(slow, image, svit_by_hand(model.agglo_method, blocks))
        torch.testing.assert_close(features[index], expected, rtol=0, atol=3e-5)
        torch.testing.assert_close(logits[index], slow.head(expected[0]), rtol=0, atol=3e-5)


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("keep_rate", [0.3, 0.7])
@torch.no_grad()
def test_evovit_is_the_slow_model(keep_rate: float, per_block: bool) -> None:
    model, x = vit(depth=8), images()
    slow = copy.deepcopy(model)
    agglo.apply(model, "evovit", keep_rate=keep_rate, blocks=(2, 5), per_block=per_block)
    with agglo.trace(model) as trace:
        features, logits = model.forward_features(x), model(x)
    assert [step.block for step in trace.steps] == ([2, 3, 4, 5, 6, 7] if per_block else [2, 5])
    processed = torch.stack([step.total.labels >= 0 for step in trace.steps])
    assert keep_rate == 0.3 or (processed[-1] & ~processed[0]).any()  # tokens come back
    for index, image in enumerate(x):
        expected = by_hand(slow, image, *evovit_by_hand([2, 5], int(64 * keep_rate), per_block))
        torch.testing.assert_close(features[index], expected, rtol=0, atol=3e-5)
        torch.testing.assert_close(logits[index], slow.head(expected[0]), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["svit", "dynamicvit_prsv"])
def test_training_processes_what_its_masks_say(name: str) -> None:
    """As if the others were not there, whose values stay: the mask of a block is that of the latest step."""
    model, x = applied(name, {}).train(), images()
    torch.manual_seed(0)
    with torch.no_grad(), agglo.trace(model) as trace:
        features = model.forward_features(x)
    masks = {step.block: step.outcome.processed for step in trace.steps}
    for index, image in enumerate(x):

        def choose(block: int, _: Tensor, index: int = index) -> list[int] | None:
            latest = [b for b in masks if b <= block]
            mask = masks[latest[-1]] if latest else None
            return None if mask is None else mask[index, 1:].nonzero().flatten().tolist()

        with torch.no_grad():
            expected = by_hand(agglo.remove(copy.deepcopy(model)).eval(), image, choose)
        # DynamicViT's attention in training lets 1e-6 of hidden tokens through.
        torch.testing.assert_close(features[index], expected, rtol=0, atol=3e-5 if name == "svit" else 1e-3)
    shares = [float(mask.mean()) for mask in masks.values() if mask is not None]
    assert all(0 < share < 1 for share in shares), shares


@pytest.mark.parametrize("class_token", [True, False])
def test_gates_may_let_everything_pass_or_nothing(class_token: bool) -> None:
    model = vit(class_token=class_token, global_pool="avg", fc_norm=False)
    x, block_0 = images(), copy.deepcopy(model.blocks[0])
    with torch.no_grad():
        dense = model.forward_features(x)
        first = model.norm(block_0(model._pos_embed(model.patch_embed(x))))
    agglo.apply(model, "svit", keep_rate=0.6)

    def decide(process: float) -> None:
        with torch.no_grad():
            for gate in model.agglo_method.gates:
                gate.decide[2].weight.zero_()
                gate.decide[2].bias.copy_(torch.tensor([process, -process]))

    decide(100.0)
    torch.testing.assert_close(model.forward_features(x), dense, rtol=0, atol=2e-5)
    decide(-100.0)
    patches = slice(int(class_token), None)
    for mode in (model.eval(), model.train()):
        mode.zero_grad()
        features = mode.forward_features(x)
        torch.testing.assert_close(features[:, patches], first[:, patches], rtol=0, atol=2e-5)
        features.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in mode.parameters())


def test_counts_and_multiply_adds_are_of_what_is_processed() -> None:
    deit = timm.create_model("deit_tiny_patch16_224")
    for name, expected in [("evovit", [196] * 4 + [137] * 8), ("svit", [196] * 3 + [137] * 3 + [96] * 3 + [67] * 3)]:
        report = agglo.report(agglo.apply(deit, name, keep_rate=0.7))
        assert report is not None and report.counts == expected and report.returning
        blocks = sum((1 + n) * 12 * 192**2 + 2 * (1 + n) ** 2 * 192 for n in expected)
        assert report.gflops_after == pytest.approx((blocks + 196 * 768 * 192 + 192 * 1000) / 1e9)
    assert "196 -> about 67 patch tokens processed" in str(report)


def test_any_schedule_says_how_many_are_processed() -> None:
    counts = Plan(agglo.Stages(0.5, blocks=(1, 3))).counts(EvoViT(), 40, 6)
    assert counts == [40, 20, 20, 10, 10, 10]
    rising = agglo.Stages([0.25, 0.5, 1.0], blocks=(1, 3, 5), returning=True)
    assert rising.counts(40, 6) == [40, 10, 10, 20, 20, 40]
    assert Plan(rising).targets(EvoViT(), 40, 6) == [None, 10, None, 20, None, 40]
    assert Plan(rising).targets(EvoViT(per_block=True), 40, 6) == [None, 10, 10, 20, 20, None]
    assert Plan(rising).counts(EvoViT(per_block=True), 40, 6) == [40, 10, 10, 20, 20, 40]
    assert Plan(agglo.Linear(3)).targets(SViT(), 40, 4) == [34, 30, 28, 28]
    assert Plan(agglo.Linear(3)).targets(EvoViT(), 40, 4) == [34, 30, 28, None]
    model = agglo.apply(vit(), "evovit", schedule=rising)
    with torch.no_grad(), agglo.trace(model) as trace:
        model(images())
    assert [step.total.n_groups - 1 for step in trace.steps] == [16, 32, 64]


def test_what_cannot_be_is_refused_before_anything_changes() -> None:
    model = vit()
    for request, complaint in [
        ({"method": "evovit", "keep_rate": 0.5, "blocks": (0, 2)}, "EvoViT.*block 0"),
        ({"method": "kmedoids", "keep_rate": 0.5, "blocks": (0, 2)}, "KMedoids.*block 0"),
        ({"method": "atc", "schedule": agglo.Stages(0.5, returning=True)}, "returning=True.*atc drops"),
        ({"method": "evovit", "keep_rate": 0.5, "momentum": 0.0}, r"momentum=0\.0"),
        ({"method": "svit", "threshold": 0.5}, "svit.*takes no threshold"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            agglo.apply(model, **request)
    assert type(model) is VisionTransformer
    with pytest.raises(ValueError, match="evovit asks what the class token"):
        agglo.apply(vit(class_token=False, global_pool="avg"), "evovit", keep_rate=0.5)
    agglo.apply(model, "kmedoids", keep_rate=0.5, blocks=(0, 2), weights="equal")
