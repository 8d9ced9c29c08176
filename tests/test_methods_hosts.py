"""Every method on every host: shapes stay, learned parameters are found, dropped tokens come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import agglo

NAMES = [info.name for info in agglo.methods()]


def timm_eva() -> nn.Module:
    """With rotary positions and a class token."""
    eva = pytest.importorskip("timm.models.eva")
    model: nn.Module = eva.Eva(
        img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=4, num_classes=5, use_rot_pos_emb=True
    )
    return model


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    model: nn.Module = models.VisionTransformer(32, 4, 4, 4, 32, 64, num_classes=5)
    return model


def open_clip_vit() -> nn.Module:
    transformer = pytest.importorskip("open_clip.transformer")
    model: nn.Module = transformer.VisionTransformer(32, 4, 32, 4, 4, 2.0, output_dim=5)
    return model


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=4
    )
    model: nn.Module = transformers.ViTModel(config)
    return model


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: Any = model(x)
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", [timm_eva, torchvision_vit, open_clip_vit, transformers_vit])
def test_every_method_runs_on_every_host(host: Any, name: str) -> None:
    torch.manual_seed(0)
    model, x = host().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():  # torchvision's head starts as zeros
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        dense = run(model, x)
    keys = list(model.state_dict())
    agglo.apply(model, name, keep_rate=0.6)
    new = len(model.state_dict()) - len(keys)
    assert (new > 0) == next(info.learns for info in agglo.methods() if info.name == name)
    with agglo.trace(model) as trace:
        reduced = run(model, x)
    assert reduced.shape == dense.shape
    assert reduced.isfinite().all()
    counts = [step.total.n_groups - 1 for step in trace.steps]
    report = agglo.reduction(model)
    assert report is not None
    assert report.counts is not None
    for step, count in zip(trace.steps, counts, strict=True):
        assert report.varies == "about" or count <= report.counts[step.block]
        assert report.varies != "no" or count == report.counts[step.block]
    assert not torch.equal(reduced, dense)
    model.train()
    run(model, x).pow(2).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    agglo.remove(model).eval()
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), dense)
