"""apply and remove on models that others have wrapped, compiled or patched."""

from __future__ import annotations

import copy
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import agglo
from agglo.testing import assert_same

timm_vit = pytest.importorskip("timm.models.vision_transformer")

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def deit() -> Any:
    torch.manual_seed(0)
    return timm_vit.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=10
    ).eval()


@torch.no_grad()
def test_a_model_compiled_in_place_notices_apply_and_remove() -> None:
    model = deit()
    dense = model(IMAGE)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert_same(model(IMAGE), dense, atol=1e-5)
    expected = agglo.apply(deit(), "tome", keep_rate=0.5)(IMAGE)
    assert_same(agglo.apply(model, "tome", keep_rate=0.5)(IMAGE), expected, atol=1e-5)
    assert_same(agglo.remove(model)(IMAGE), dense, atol=1e-5)


def test_a_compiled_tower_is_found_inside_a_model() -> None:
    model = agglo.apply(nn.Sequential(torch.compile(deit(), backend="eager"), nn.Identity()), keep_rate=0.5)
    report = agglo.report(model)
    assert report is not None and report.n_tokens == 16


def test_a_forward_on_the_instance_would_hide_the_reduction() -> None:
    model = deit()
    model.forward = types.MethodType(type(model).forward, model)
    with pytest.raises(agglo.UnsupportedModelError, match="forward of this VisionTransformer was replaced"):
        agglo.apply(model, keep_rate=0.5)
    assert agglo.report(model) is None


@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_accelerates_mixed_precision() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of training tests in this process
    try:
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = agglo.apply(deit(), keep_rate=0.5)(IMAGE)
        prepared = accelerator.prepare_model(agglo.apply(deit(), keep_rate=0.5))
        assert_same(prepared(IMAGE), expected.float(), atol=1e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dense = deit()(IMAGE)
        assert_same(agglo.remove(prepared)(IMAGE), dense.float())  # its wrapper holds on to the reduced forward
        with pytest.raises(agglo.UnsupportedModelError, match=r"call agglo\.apply before"):
            agglo.apply(accelerator.prepare_model(deit()), keep_rate=0.5)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@torch.no_grad()
def test_remove_does_not_undo_what_came_later() -> None:
    model = agglo.apply(deit(), keep_rate=0.5)
    parametrize.register_parametrization(model, "cls_token", Doubled())
    reduced = model(IMAGE)
    with pytest.raises(RuntimeError, match=r"undo that before agglo\.remove"):
        agglo.remove(model)
    assert_same(model(IMAGE), reduced)
    parametrize.remove_parametrizations(model, "cls_token")
    assert agglo.report(agglo.remove(model)) is None


def test_threads_may_apply_at_once() -> None:
    original = deit()
    original.__class__ = type("Fresh", (type(original),), {"__module__": "timm"})  # no reduced class of it exists yet
    models = [copy.copy(original) for _ in range(8)]
    barrier = threading.Barrier(len(models))

    def work(model: nn.Module) -> None:
        barrier.wait()
        agglo.apply(model, keep_rate=0.5)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({type(model) for model in models}) == 1
    for model in models:
        assert type(agglo.remove(model)) is type(original)
