"""ONNX by both of torch's exporters: ToMe runs in onnxruntime as in torch, ATC says why it cannot."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo.testing import assert_same

runtime = pytest.importorskip("onnxruntime", reason="an exported file runs only with onnxruntime")
pytest.importorskip("onnxscript", reason="torch writes ONNX files with onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def build(library: str) -> nn.Module:
    """A small vision transformer of a library: 16 patches, 4 blocks."""
    torch.manual_seed(0)
    module, name, options = {
        "timm": (
            "timm.models.vision_transformer",
            "VisionTransformer",
            {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5},
        ),
        "timm, rotary": (
            "timm.models.eva",
            "Eva",
            {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "use_rot_pos_emb": True},
        ),
        "open_clip": (
            "open_clip.transformer",
            "VisionTransformer",
            {"image_size": 32, "patch_size": 8, "width": 32, "layers": 4, "heads": 2, "mlp_ratio": 2.0},
        ),
    }[library]
    pytest.importorskip(module.split(".")[0])
    model: nn.Module = getattr(importlib.import_module(module), name)(**options)
    with torch.no_grad():
        for parameter in model.parameters():  # heads start at zero in some libraries
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


@pytest.mark.parametrize(("library", "dynamo"), [("timm", True), ("timm, rotary", False), ("open_clip", False)])
def test_tome_runs_in_onnxruntime_on_any_batch(library: str, dynamo: bool, tmp_path: Path) -> None:
    model, path = agglo.apply(build(library), "tome", keep_rate=0.5), str(tmp_path / "model.onnx")
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
    model = agglo.apply(build("timm"), method, keep_rate=0.5)
    with pytest.raises(RuntimeError, match=r"ONNX has no operator for .*method='tome' exports"):
        torch.onnx.export(model, (IMAGE,), io.BytesIO(), dynamo=dynamo, verbose=False)
    with torch.no_grad():
        assert model(IMAGE).isfinite().all()  # and still runs


@pytest.mark.parametrize("name", ["evovit", "pool"])
def test_what_only_gathers_and_averages_exports(name: str, tmp_path: Path) -> None:
    model, path = agglo.apply(build("timm"), name, keep_rate=0.5), str(tmp_path / "model.onnx")
    torch.onnx.export(model, (IMAGE,), path, dynamo=False, verbose=False)
    session = runtime.InferenceSession(path)
    (output,) = session.run(None, {session.get_inputs()[0].name: IMAGE.numpy()})
    assert_same(torch.from_numpy(output), model(IMAGE).detach(), atol=1e-5)
