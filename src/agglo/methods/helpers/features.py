"""What merging methods compare tokens by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from agglo.methods.base import View

FEATURES = ("keys", "keys_per_head", "tokens", "values")


def require_known(features: str) -> str:
    """The name itself, or ValueError."""
    if features not in FEATURES:
        raise ValueError(f"features={features!r} is not known; accepted: {', '.join(map(repr, FEATURES))}")
    return features


def patch_features(view: View, features: str) -> Tensor:
    """Features (B, N, D) of the patch tokens, without gradient.

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
