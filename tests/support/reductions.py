"""Small vision transformers and views of random tokens, for tests of methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agglo.methods import Method, ModelShape, View

STAGES = {0.25: [49, 12, 3], 0.5: [98, 49, 24], 0.7: [137, 96, 67], 0.9: [176, 158, 142]}  # of 196, as published


def lively_vit(img_size: int | tuple[int, int] = 56, depth: int = 12, **options: Any) -> Any:
    """Patches of 4 x 4 (14 x 14 of them, as DeiT's, by default), few channels, and weights that matter."""
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


def images(batch: int = 2, size: tuple[int, int] = (56, 56)) -> Tensor:
    """Random images, of which later ones have more contrast, so that they differ in what is decided."""
    x = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))
    return x * torch.linspace(0.2, 2, batch)[:, None, None, None]


def view(seed: int = 0, batch: int = 2, n: int = 13, target: int | None = 5, prefix: int = 1, **changes: Any) -> Any:
    """Random tokens with 8 channels, 3 heads, and attention of which some tokens get most."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, prefix + n)
    shown: dict[str, Any] = {
        "tokens": torch.randn(*shape, 8, generator=generator),
        "attention_received": torch.rand(shape, generator=generator),
        "keys": torch.randn(batch, 3, prefix + n, 4, generator=generator),
        "values": torch.randn(batch, 3, prefix + n, 4, generator=generator),
        "class_attention": (3 * torch.randn(batch, 3, prefix + n, generator=generator)).softmax(-1),
    }
    return View(**{**shown, "prefix": prefix, "target": target, **changes})


def built(method: Method, n: int = 13, target: int = 5, prefix: int = 1, width: int = 8) -> Any:
    """The method with its parameters, for one stage."""
    torch.manual_seed(0)
    method.build(ModelShape(stages=((n, target),), width=width, heads=2, prefix=prefix))
    return method


@torch.no_grad()
def sklearn_atc_logits(
    model: Any, x: Tensor, counts: dict[int, int], linkage: str = "average", before_block: bool = False
) -> Tensor:
    """ATC on a DeiT written out plainly, one image at a time, with scikit-learn's labels and explicit softmax."""
    cluster = pytest.importorskip("sklearn.cluster")

    def merged(tokens: Tensor, sizes: Tensor, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        features = features[1:].double() / features[1:].double().norm(dim=1, keepdim=True)
        fit = cluster.AgglomerativeClustering(count, metric="precomputed", linkage=linkage)
        labels = np.concatenate([[0], 1 + fit.fit((1 - features @ features.T).numpy()).labels_])
        groups = [np.flatnonzero(labels == group) for group in range(count + 1)]
        means = torch.stack([(tokens[g] * sizes[g, None]).sum(0) / sizes[g].sum() for g in groups])
        return means, torch.stack([sizes[g].sum() for g in groups])

    logits = []
    for image in x:
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
        sizes = torch.ones(len(tokens))
        for index, block in enumerate(model.blocks):
            if before_block and index in counts:
                tokens, sizes = merged(tokens, sizes, tokens, counts[index])
            attn, n = block.attn, len(tokens)
            q, k, v = attn.qkv(block.norm1(tokens)).view(n, 3, attn.num_heads, -1).permute(1, 2, 0, 3)
            weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + sizes.log()).softmax(-1)
            tokens = tokens + attn.proj((weights @ v).transpose(0, 1).reshape(n, -1))
            if not before_block and index in counts:
                tokens, sizes = merged(tokens, sizes, k.mean(0), counts[index])
            tokens = tokens + block.mlp(block.norm2(tokens))
        logits.append(model.head(model.norm(tokens)[0]))
    return torch.stack(logits)
