"""A small DeiT and views of random tokens, for tests of methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agglo.methods import Method, ModelShape, Outcome, View

STAGES = {0.25: [49, 12, 3], 0.5: [98, 49, 24], 0.7: [137, 96, 67], 0.9: [176, 158, 142]}  # of 196, as published


def deit(width: int = 24, image: int = 56, patch: int = 4, classes: int = 5) -> nn.Module:
    """DeiT's geometry, 14 x 14 patches and 12 blocks, with few channels."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model: nn.Module = timm.VisionTransformer(
        img_size=image, patch_size=patch, embed_dim=width, depth=12, num_heads=3, num_classes=classes
    )
    return model.eval()


def lively_vit(img_size: int | tuple[int, int], depth: int, **options: Any) -> Any:
    """Patches of 4 x 4, few channels, and weights that matter."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = timm.VisionTransformer(
        img_size=img_size, patch_size=4, embed_dim=24, depth=depth, num_heads=3, num_classes=5, **options
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
        for block in model.blocks:  # so that attention is far from even
            block.attn.qkv.weight.mul_(5)
    return model


def view(seed: int = 0, batch: int = 2, n: int = 13, target: int = 5, prefix: int = 1, **changes: Any) -> View:
    """Random tokens with 8 channels before a block."""
    generator = torch.Generator().manual_seed(seed)
    shown: dict[str, Any] = {
        "tokens": torch.randn(batch, prefix + n, 8, generator=generator),
        "keys": None,
        "values": None,
        "class_attention": None,
        "sizes": None,
        "counts": None,
        "prefix": prefix,
        "target": target,
        "threshold": None,
        "stage": 0,
        "training": False,
        "attention_received": torch.rand(batch, prefix + n, generator=generator),
    }
    return View(**{**shown, **changes})


def built(method: Method, n: int = 13, target: int = 5, prefix: int = 1, width: int = 8) -> Method:
    """The method with its parameters, for one stage."""
    torch.manual_seed(0)
    method.build(ModelShape(stages=((n, target),), width=width, heads=2, prefix=prefix))
    return method


def new_tokens(outcome: Outcome, shown: View) -> Tensor:
    """What the loop over blocks goes on with."""
    return outcome.new_tokens(shown.tokens)
