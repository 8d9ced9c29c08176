"""ONNX by both of torch's exporters: ToMe runs in onnxruntime as in torch, ATC says why it cannot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import agglo
from agglo.testing import assert_same
from tests.support.families import FAMILIES

runtime = pytest.importorskip("onnxruntime", reason="an exported file runs only with onnxruntime")
pytest.importorskip("onnxscript", reason="torch writes ONNX files with onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def build(family: str) -> Any:
    """Two blocks: one that reduces, and one after or before it."""
    pytest.importorskip(family.partition("-")[0])
    model = next(one for one in FAMILIES if one.id == family).fresh()
    del (model.transformer.resblocks if family.startswith("open_clip") else model.blocks)[2:]
    return model


@pytest.mark.parametrize(
    ("library", "dynamo"),
    [("timm-VisionTransformer", True), ("timm-Eva", False), ("open_clip-VisionTransformer", False)],
)
def test_tome_runs_in_onnxruntime_on_any_batch(library: str, dynamo: bool, tmp_path: Path) -> None:
    model, path = agglo.apply(build(library), "tome", keep_rate=0.5, blocks=(0,)), str(tmp_path / "model.onnx")
    any_batch: dict[str, Any] = (
        {"dynamic_shapes": ({0: "batch"},)}
        if dynamo
        else {"dynamic_axes": {"image": {0: "batch"}}, "input_names": ["image"]}
    )
    # With gradients on: without them nn.MultiheadAttention takes a fused road that TorchScript cannot export.
    torch.onnx.export(model, (IMAGE,), path, dynamo=dynamo, verbose=False, **any_batch)
    session = runtime.InferenceSession(path)
    for images in (IMAGE, IMAGE.repeat(3, 1, 1, 1).flip(3)):
        (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        assert_same(torch.from_numpy(output), model(images).detach(), atol=1e-5)


@pytest.mark.parametrize(("method", "dynamo"), [("atc", False), ("atc", True), ("ats", False)])
def test_others_say_that_onnx_cannot_hold_them(method: str, dynamo: bool) -> None:
    model = agglo.apply(build("timm-VisionTransformer"), method, keep_rate=0.5, blocks=(0,))
    with pytest.raises(RuntimeError, match=r"ONNX has no operator for .*method='tome' exports"):
        torch.onnx.export(model, (IMAGE,), io.BytesIO(), dynamo=dynamo, verbose=False)
    with torch.no_grad():
        assert model(IMAGE).isfinite().all()  # and still runs


@pytest.mark.parametrize("name", ["evovit", "pool"])
def test_what_only_gathers_and_averages_exports(name: str, tmp_path: Path) -> None:
    model, path = build("timm-VisionTransformer"), str(tmp_path / "model.onnx")
    agglo.apply(model, name, keep_rate=0.5, blocks=(1,))
    torch.onnx.export(model, (IMAGE,), path, dynamo=False, verbose=False)
    session = runtime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: IMAGE.numpy()})
    assert_same(torch.from_numpy(output), model(IMAGE).detach(), atol=1e-5)
