"""place="before_block": a hard-merging method acts before a block, so that its attention has fewer tokens too."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import agglo
from agglo.grouping import Grouping
from agglo.methods import Method, ModelShape, Outcome, View
from agglo.testing import assert_same
from tests.support.class_heads import counted_flops
from tests.support.reductions import lively_vit, sklearn_atc_logits

IMAGE = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
BEFORE: dict[str, Any] = {"place": "before_block", "features": "tokens"}


@torch.no_grad()
def test_atc_before_blocks_is_what_scikit_learn_makes_of_it() -> None:
    model = lively_vit(24, 4)
    expected = sklearn_atc_logits(model, IMAGE, {0: 30, 2: 11}, before_block=True)
    agglo.apply(model, schedule=[6, 0, 19], **BEFORE)
    assert_same(model(IMAGE), expected, atol=1e-4)
    agglo.apply(model, schedule=[6, 0, 19], features="tokens")
    assert not torch.allclose(model(IMAGE), expected, atol=1e-3)


@pytest.mark.parametrize("method", ["atc", "pool"])
def test_flops_that_run_are_those_reported(method: str) -> None:
    model, reported = lively_vit(24, 4), []
    options = {} if method == "pool" else {"features": "tokens"}
    for place in ("after_attention", "before_block"):
        agglo.apply(model, method, keep_rate=0.6, place=place, **options)
        report: Any = agglo.report(model)
        assert report.config.place == place
        beyond = counted_flops(model, IMAGE) - 2e9 * report.gflops_after
        assert -1 < beyond < 3 * 2 * 36 * 36 * 24  # the method's own products, at most of all pairs of tokens
        reported.append(report.gflops_after)
    assert reported[1] < reported[0]


class Recorder(Method):
    """Merges pairs of neighbours and keeps what it saw."""

    name: ClassVar[str] = "recorder"
    needs_class_attention: ClassVar[bool] = True
    needs_attention_received: ClassVar[bool] = True

    def __init__(self) -> None:
        self.views: list[View] = []
        self.shapes: list[ModelShape] = []

    def check(self, shape: ModelShape) -> None:
        self.shapes.append(shape)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        self.views.append(view)
        n = int(view.patches.shape[1])
        labels = (torch.arange(n) * view.target // n).expand(len(view.tokens), n)
        return Outcome(Grouping.of(labels, view.target, view.prefix, view.sizes))


def attention_of(block: Any, x: Tensor, sizes: Tensor) -> Tensor:
    attn = block.attn
    q, k, _ = attn.qkv(block.norm1(x)).view(*x.shape[:2], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(-2, -1) * attn.scale + sizes.log()[:, None, None]).softmax(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def test_attention_is_that_of_the_block_before() -> None:
    model, method = lively_vit(24, 4), Recorder()
    agglo.apply(model, method, schedule=[6, 10, 0, 5], place="before_block")
    model(IMAGE)
    first, second, *_ = method.views
    assert method.shapes[0].place == "before_block"
    assert first.keys is first.values is first.class_attention is first.attention_received is None
    x, sizes = method.reduce(first).grouping.merge(first.tokens), second.sizes
    assert sizes is not None
    weights = attention_of(model.blocks[0], x, sizes)
    torch.testing.assert_close(second.class_attention, weights[:, :, 0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(second.attention_received, weights.sum(dim=(1, 2)), rtol=1e-4, atol=1e-5)


def test_the_model_compiles_and_trains() -> None:
    model = agglo.apply(lively_vit(24, 2), "tome", keep_rate=0.6, blocks=(1,), **BEFORE)
    expected = model(IMAGE)
    torch._dynamo.reset()
    assert_same(torch.compile(model, fullgraph=True, backend="eager")(IMAGE), expected, atol=1e-5)
    expected.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
