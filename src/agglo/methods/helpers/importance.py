"""How much the attention of a block makes of each token, as weights for the distances between tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.methods.base import View

IMPORTANCE = (None, "class", "received")
MOST_EXPONENT = 4  # weights are at most N ** exponent, which must stay far from the end of float32


def patch_weights(view: View, importance: str, exponent: float) -> Tensor:
    """Weights (B, N) float32 of the patch tokens: (attention to each / mean attention of the image) ** exponent.

    importance: whose attention: that of the "class" token, mean over heads; or all that was "received".

    The attention to a merged token is that to all its patches. Divided by their number it would no longer hold large
    groups back from growing: on DeiT-Tiny (64 images, exponent 0.5) the KL divergence from the dense model's outputs is
    then 1.4 to 2.8 times as great.
    """
    attention = view.attention_received if importance == "received" else _of_class_token(view)
    if attention is None:
        raise ValueError(f"importance={importance!r} needs the attention of a block, and there is none at this place")
    to_patches = attention[:, view.prefix :].detach().float()
    n_real: int | Tensor = to_patches.shape[1]
    if view.counts is not None:
        padding = torch.arange(to_patches.shape[1], device=to_patches.device) >= view.counts.unsqueeze(1)
        to_patches = to_patches.masked_fill(padding, 0)
        n_real = view.counts.clamp(min=1).unsqueeze(1)
    mean = to_patches.sum(dim=1, keepdim=True) / n_real
    return (to_patches / mean.clamp(min=torch.finfo(torch.float32).tiny)).pow(exponent)


def _of_class_token(view: View) -> Tensor | None:
    return None if view.class_attention is None else view.class_attention.float().mean(dim=1)
