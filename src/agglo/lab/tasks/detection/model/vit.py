"""The plain ViT inside a ViT-Adapter: DeiT's shapes, any timm ViT without its head, and the embedded classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import Format
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from agglo.checks import choice
from agglo.embedded import classifier as embedded
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.hosts.timm import TimmViT
from agglo.lab.tasks.detection.data.transforms import MEAN, STD
from agglo.models.checkpoints import load_exactly

MINIATURE = "miniature"  # the name of the detector on the embedded classifier
ENLARGED = 4
MINIATURE_SIDE = 28 * ENLARGED  # pixels of its images: as many patches as the embedded classifier has
_AFTER_THE_BLOCKS = ("head.", "norm.", "fc_norm.", "pre_logits.", "attn_pool.")


class ViTSize(NamedTuple):
    width: int
    heads: int
    drop_path: float  # of the last block and of the adapter


SIZES = {"tiny": ViTSize(192, 3, 0.1), "small": ViTSize(384, 6, 0.2)}


def plain_vit(size: str, *, class_token: bool = False, drop_path: float | None = None) -> nn.Module:
    """Return DeiT-Tiny or -Small without last norm and head.

    drop_path: Of the last block, rising to it from 0 at the first; None takes that of the size.
    """
    width, heads, usual = SIZES[choice("size", size, tuple(SIZES))]
    return VisionTransformer(
        embed_dim=width,
        num_heads=heads,
        drop_path_rate=usual if drop_path is None else drop_path,
        class_token=class_token,
        global_pool="",
        num_classes=0,
        final_norm=False,
        dynamic_img_size=True,
    )


def prepare_vit(vit: Any, class_token: bool) -> int:
    """Strip a timm model of all but what an adapter runs; returns the width of its patches."""
    host = TimmViT()
    if not host.recognises(vit):
        accepted = ", ".join(host.model_classes)
        raise UnsupportedModelError(f"{type(vit).__name__} cannot be the ViT of an adapter; accepted: {accepted}")
    host.check(vit)
    embedding = vit.patch_embed
    patch = embedding.patch_size
    if type(embedding).__name__ != "PatchEmbed" or patch[0] != patch[1] or patch[0] not in (4, 8, 16):
        found = f"{type(embedding).__name__} of {patch[0]} x {patch[1]} pixels"
        raise UnsupportedModelError(f"{found}; supported: PatchEmbed of 4, 8 and 16 squared (see set_input_size)")
    if getattr(vit, "rope", None) is not None and not vit.dynamic_img_size:
        raise UnsupportedModelError("this rotary ViT has tables for one image size: make it with dynamic_img_size=True")
    has_token = getattr(vit, "cls_token", None) is not None
    if class_token and not has_token:
        raise ValueError("class_token=True needs a ViT that has one")
    if has_token and not class_token:
        _drop_class_token(vit)
    vit.norm = vit.fc_norm = vit.head = nn.Identity()
    vit.attn_pool, vit.dynamic_img_size = None, True
    embedding.strict_img_size, embedding.flatten, embedding.output_fmt = False, False, Format.NHWC
    return int(patch[0])


def _drop_class_token(vit: Any) -> None:
    """Remove the class token of a ViT with its position embedding; register tokens stay."""
    if getattr(vit, "dist_token", None) is not None:
        raise UnsupportedModelError("a distilled ViT needs both of its first tokens: give class_token=True")
    vit.cls_token = None
    if vit.pos_embed is not None and not vit.no_embed_class:
        vit.pos_embed = nn.Parameter(vit.pos_embed.detach()[:, 1:].clone())
    vit.num_prefix_tokens -= 1
    for block in vit.blocks:
        if hasattr(block.attn, "num_prefix_tokens"):
            block.attn.num_prefix_tokens -= 1
    vit.has_class_token = False


def load_vit(vit: Any, state: Mapping[str, Tensor], source: str) -> None:
    """Load a timm checkpoint (DeiT, AugReg) into a plain ViT.

    What comes after the blocks is left out, and the class token with its position if the ViT has none. A checkpoint of
    another image size brings its own grid of positions, which the ViT takes over.
    """
    kept = {name: value for name, value in state.items() if not name.startswith(_AFTER_THE_BLOCKS)}
    if vit.cls_token is None:
        kept.pop("cls_token", None)
    positions = kept.get("pos_embed")
    if positions is not None and vit.pos_embed is not None:
        side = math.isqrt(positions.shape[1])
        own = vit.pos_embed.shape[1] - math.prod(vit.patch_embed.grid_size)
        kept["pos_embed"] = positions[:, max(0, positions.shape[1] - side**2 - own) :]
        if tuple(vit.patch_embed.grid_size) != (side, side):
            vit.set_input_size(img_size=tuple(side * patch for patch in vit.patch_embed.patch_size))
    load_exactly(vit, kept, source)


def miniature_vit(*, pretrained: bool = True, drop_path: float = 0.0) -> nn.Module:
    """Return the embedded Fashion-MNIST classifier as a ViT 64 wide, with 12 blocks and patches of 8 x 8 pixels.

    The classifier takes grey images of 28 x 28 pixels. Here images are four times as large, have three channels, and
    are normalised as a detector's are; the patch embedding is changed so that a grey image, enlarged pixel by pixel,
    gives the very same tokens: each channel carries a third of the grey value, each small pixel its share of the large.
    """
    small: Any = timm.create_model(embedded.NAME, pretrained=pretrained, drop_path_rate=drop_path)
    patch = small.patch_embed.proj.kernel_size[0] * ENLARGED
    options = {"in_chans": 3, "img_size": MINIATURE_SIDE, "patch_size": patch, "drop_path_rate": drop_path}
    large: nn.Module = timm.create_model(embedded.NAME, pretrained=False, **options)
    state, weight, bias = small.state_dict(), "patch_embed.proj.weight", "patch_embed.proj.bias"
    [mean], [std] = small.default_cfg["mean"], small.default_cfg["std"]
    spread = state[weight].repeat_interleave(ENLARGED, 2).repeat_interleave(ENLARGED, 3) / (3 * ENLARGED**2)
    channel_mean, channel_std = (torch.tensor(values).view(1, 3, 1, 1) / 255 for values in (MEAN, STD))
    state[weight] = spread * channel_std / std
    state[bias] = state[bias] + (spread * (channel_mean - mean) / std).sum((1, 2, 3))
    large.load_state_dict(state)
    return large.train()
