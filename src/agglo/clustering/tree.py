"""From a tree of merges to labels, in torch on any device, without a look at the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return float64, as SciPy's trees have, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def number_by_first_member(group: Tensor) -> Tensor:
    """Number groups by first member: labels (B, N) from any group ids (B, N) below 2N."""
    batch, n_tokens = group.shape
    position = torch.arange(n_tokens, device=group.device).expand(batch, n_tokens)
    n_ids = max(2 * n_tokens, 1)
    first = torch.full((batch, n_ids), n_tokens, dtype=torch.int64, device=group.device)
    first = first.scatter_reduce(1, group, position, reduce="amin").gather(1, group)
    rank = (first == position).to(torch.int64).cumsum(1) - 1
    return rank.gather(1, first)


def cut(merges: Tensor, k: Tensor) -> Tensor:
    """Return labels (B, N) after the first N - k merges of linkage matrices (B, N-1, 4) and k (B,)."""
    batch, n_merges, _ = merges.shape
    n_tokens = n_merges + 1
    device = merges.device
    node = torch.arange(2 * n_tokens - 1, device=device).expand(batch, -1)
    row = torch.arange(n_merges, device=device).expand(batch, -1)
    done = row < (n_tokens - k).unsqueeze(1)
    children = merges[..., :2].to(torch.int64)
    parent = node.contiguous()
    for side in range(2):
        child = children[..., side]
        parent = parent.scatter(1, child, torch.where(done, row + n_tokens, child))
    # Every jump doubles the way; the longest way up a tree of N leaves is N - 1.
    for _ in range(math.ceil(math.log2(n_tokens)) if n_tokens > 1 else 0):
        parent = parent.gather(1, parent)
    return number_by_first_member(parent[:, :n_tokens])
