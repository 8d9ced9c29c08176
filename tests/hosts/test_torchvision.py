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

SIZES = (64, 8, 8, 4, 48, 96)  # of the image and its patches, layers, heads, and both widths


class TestViT(HostContract):
    """With all that torchvision's model may have."""

    threshold = 1e-3

    def model(self) -> nn.Module:
        stem = [ConvStemConfig(out_channels=width, kernel_size=3, stride=2) for width in (8, 16, 32)]
        dropouts = {"dropout": 0.1, "attention_dropout": 0.1}
        return VisionTransformer(*SIZES, **dropouts, conv_stem_configs=stem, representation_size=20)


@pytest.mark.parametrize(("name", "image_size", "published"), [("vit_b_32", 224, 4.409), ("vit_b_16", 384, 55.484)])
def test_flops_are_those_torchvision_publishes(name: str, image_size: int, published: float) -> None:
    with torch.device("meta"):
        model = getattr(models, name)(image_size=image_size)
    report: Any = agglo.report(agglo.apply(model, keep_rate=0.5))
    assert report.gflops_before == pytest.approx(published, abs=1e-3)


class OtherAttention(nn.MultiheadAttention):
    """As an adapter around the attention would be."""


def test_what_agglo_would_bypass_is_refused_by_name() -> None:
    model = VisionTransformer(*SIZES)
    model.encoder.layers[3].self_attention = OtherAttention(48, 4, batch_first=True)
    with pytest.raises(agglo.UnsupportedModelError, match=r"OtherAttention \(from tests.hosts"):
        agglo.apply(model, keep_rate=0.5)
    model.encoder.layers[3].self_attention = nn.MultiheadAttention(48, 4, batch_first=True, add_zero_attn=True)
    with pytest.raises(agglo.UnsupportedModelError, match="add_zero_attn"):
        agglo.apply(model, keep_rate=0.5)
    model = agglo.apply(VisionTransformer(*SIZES), keep_rate=0.5)
    model.encoder.layers[3].self_attention = OtherAttention(48, 4, batch_first=True)
    with pytest.raises(agglo.UnsupportedModelError, match="OtherAttention"):
        model(torch.zeros(1, 3, 64, 64))
