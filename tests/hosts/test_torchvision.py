"""torchvision's vision transformer: the contract, the ways people call it, and ATC against the timm host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import agglo
from agglo.testing import HostContract

models = pytest.importorskip("torchvision.models")
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer  # noqa: E402

SMALL = {
    "image_size": 64,
    "patch_size": 8,
    "num_layers": 8,
    "num_heads": 4,
    "hidden_dim": 48,
    "mlp_dim": 96,
    "num_classes": 10,
}
IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def randomised(model: nn.Module) -> Any:
    """torchvision starts heads at zero; a test needs outputs that depend on the input."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    return randomised(VisionTransformer(**{**SMALL, **options}))


class TestViT(HostContract):
    """With all that torchvision's model may have."""

    threshold = 1e-3

    def model(self) -> nn.Module:
        stem = [ConvStemConfig(out_channels=width, kernel_size=3, stride=2) for width in (8, 16, 32)]
        dropouts = {"dropout": 0.1, "attention_dropout": 0.1}
        return VisionTransformer(**SMALL, **dropouts, conv_stem_configs=stem, representation_size=20)


@pytest.mark.parametrize(("name", "image_size", "published"), [("vit_b_32", 224, 4.409), ("vit_b_16", 384, 55.484)])
def test_flops_are_those_torchvision_publishes(name: str, image_size: int, published: float) -> None:
    with torch.device("meta"):
        model = getattr(models, name)(image_size=image_size)
    report = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report is not None
    assert report.gflops_before == pytest.approx(published, abs=1e-3)


class OtherAttention(nn.MultiheadAttention):
    """As an adapter around the attention would be."""


def test_what_agglo_would_bypass_is_refused_by_name() -> None:
    model = vit()
    model.encoder.layers[3].self_attention = OtherAttention(48, 4, batch_first=True)
    with pytest.raises(agglo.UnsupportedModelError, match=r"OtherAttention \(from tests.hosts"):
        agglo.apply(model, keep_rate=0.5)
    model.encoder.layers[3].self_attention = nn.MultiheadAttention(48, 4, batch_first=True, add_zero_attn=True)
    with pytest.raises(agglo.UnsupportedModelError, match="add_zero_attn"):
        agglo.apply(model, keep_rate=0.5)
    model = agglo.apply(vit(), keep_rate=0.5)
    model.encoder.layers[3].self_attention = OtherAttention(48, 4, batch_first=True)
    with pytest.raises(agglo.UnsupportedModelError, match="OtherAttention"):
        model(IMAGE)
