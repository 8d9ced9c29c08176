"""ImageNet weights of a timm ViT (DeiT, AugReg) for the plain ViT of a detector, every tensor accounted for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from agglo.experiments.checkpoints import load_exactly

_AFTER_THE_BLOCKS = ("head.", "head_dist.", "norm.", "fc_norm.", "pre_logits.")
_PREFIX = ("cls_token", "dist_token")


def is_vit(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the names of a timm vision transformer."""
    return "patch_embed.proj.weight" in state and any(name.startswith("blocks.0.") for name in state)


def load_vit(vit: nn.Module, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Load a timm checkpoint into the plain ViT of a detector; returns what was left out, in words.

    What comes after the blocks has no place there, and without a class token neither has that token and its position.
    A checkpoint of another image size brings its own grid of positions: the ViT takes it over.
    """
    keeps_token = getattr(vit, "cls_token", None) is not None
    left_out = [name for name in state if name.startswith(_AFTER_THE_BLOCKS)]
    left_out += [name for name in _PREFIX if name in state and not (keeps_token and name == "cls_token")]
    kept = {name: value for name, value in state.items() if name not in left_out}
    positions = kept.get("pos_embed")
    if positions is not None and positions.ndim == 3:
        side = math.isqrt(positions.shape[1])
        prefix = positions.shape[1] - side**2
        patches = positions[:, prefix:]
        _set_grid(vit, side)
        if keeps_token:
            if prefix > 1:
                left_out.append("pos_embed of all prefix tokens but the class token")
            kept["pos_embed"] = positions[:, [0, *range(prefix, positions.shape[1])]] if prefix else positions
        elif prefix:
            left_out.append("pos_embed of the prefix tokens")
            kept["pos_embed"] = patches
    load_exactly(vit, kept, source)
    return left_out


def _set_grid(vit: Any, side: int) -> None:
    patch = vit.patch_embed.patch_size
    if tuple(vit.patch_embed.grid_size) != (side, side):
        vit.set_input_size(img_size=(side * patch[0], side * patch[1]))
