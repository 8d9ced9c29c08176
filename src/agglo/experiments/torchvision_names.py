"""Weights of torchvision's vision transformers, SWAG's among them, under the names that timm has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_SIGN = "conv_proj.weight"
_WHOLE = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj": "patch_embed.proj",
    "encoder.ln": "norm",
    "heads.head": "head",
}
_IN_BLOCK = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "self_attention.in_proj_": "attn.qkv.",
    "self_attention.out_proj": "attn.proj",
    "mlp.0": "mlp.fc1",
    "mlp.3": "mlp.fc2",
    # Files of before torchvision 0.12.
    "mlp.linear_1": "mlp.fc1",
    "mlp.linear_2": "mlp.fc2",
}
_BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")


def is_torchvision(state: Mapping[str, Tensor]) -> bool:
    return _SIGN in state


def as_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both libraries lay their matrices out alike: only names differ. A name that is not known stays as it is."""
    return {_renamed(name): value for name, value in state.items()}


def _renamed(name: str) -> str:
    """
    >>> _renamed("encoder.layers.encoder_layer_3.self_attention.in_proj_weight"), _renamed("heads.head.bias")
    ('blocks.3.attn.qkv.weight', 'head.bias')
    """
    block = _BLOCK.fullmatch(name)
    known, inner, front = (_WHOLE, name, "") if block is None else (_IN_BLOCK, block[2], f"blocks.{block[1]}.")
    for theirs, ours in known.items():
        if inner.startswith(theirs):
            return f"{front}{ours}{inner[len(theirs) :]}"
    return name
