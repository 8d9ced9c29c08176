"""The plain ViT of the detectors: DeiT without class token, last norm and head."""

from __future__ import annotations

from typing import Any, NamedTuple

from timm.models.vision_transformer import VisionTransformer
from torch import nn


class Size(NamedTuple):
    """drop_path: of the last block, and of the adapter."""

    width: int
    heads: int
    drop_path: float


SIZES = {"tiny": Size(192, 3, 0.1), "small": Size(384, 6, 0.2)}


def plain_vit(
    size: str = "tiny", *, class_token: bool = False, drop_path: float | None = None, layer_scale: bool = False
) -> nn.Module:
    """DeiT-Tiny or -Small as the detectors have it.

    drop_path: of the last block, rising to it from 0 at the first; None takes that of the size.
    layer_scale: as the original ViT-Adapter has; the detectors of the study have none.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is not known; accepted: {', '.join(map(repr, SIZES))}")
    width, heads, usual_drop_path = SIZES[size]
    options: dict[str, Any] = {"init_values": 1.0} if layer_scale else {}
    return VisionTransformer(
        embed_dim=width,
        num_heads=heads,
        drop_path_rate=usual_drop_path if drop_path is None else drop_path,
        class_token=class_token,
        global_pool="",
        num_classes=0,
        final_norm=False,
        dynamic_img_size=True,
        **options,
    )
