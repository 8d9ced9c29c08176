"""Features that merging methods compare tokens by, and weights for the distances between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.methods.base import View

IMPORTANCE = (None, "class", "received")
MOST_EXPONENT = 4  # weights are at most N ** exponent, which must stay far from the end of float32
FEATURES = ("keys", "keys_per_head", "tokens", "values")


def patch_features(view: View, features: str) -> Tensor:
    """Return features (B, N, D) of the patch tokens, without gradient.

    keys, values: averaged over heads (keys are the paper's choice).
    keys_per_head: the unit keys of every head, concatenated: their cosine is the mean of the heads' cosines.
    tokens: the tokens themselves, after attention.
    """
    if features == "tokens":
        return view.tokens[:, view.prefix :].detach()
    per_head = view.values if features == "values" else view.keys
    if per_head is None:
        raise ValueError(f"features={features!r} do not exist before a block's attention; 'tokens' do")
    patches = per_head[:, :, view.prefix :].detach().float()
    if features == "keys_per_head":
        return F.normalize(patches, dim=-1).transpose(1, 2).flatten(2)
    # Head by head takes half the time of mean(dim=1), which strides through memory.
    first, *others = patches.unbind(dim=1)
    if not others:
        return first
    total = first + others[0]
    for head in others[1:]:
        total += head
    return total.div_(patches.shape[1])


def patch_weights(view: View, importance: str, exponent: float) -> Tensor:
    """Return weights (B, N) of the patch tokens: (attention to each / mean attention of the image) ** exponent.

    importance: whose attention: that of the "class" token, mean over heads; or all that was "received".

    The attention to a merged token is that to all its patches. Divided by their number it would no longer hold large
    groups back from growing: on DeiT-Tiny (64 images, exponent 0.5) the KL divergence from the dense model's outputs is
    then 1.4 to 2.8 times as great.
    """
    attention = view.attention_received
    if importance == "class":
        attention = None if view.class_attention is None else view.class_attention.float().mean(dim=1)
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
