"""The weighted mean of the members of each group, in one pass over the tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.cpu.jit import kernel
from agglo.clustering.cpu.threads import available, run

_NUMBERS_PER_THREAD = 300_000  # for fewer, waking one takes longer than the work
_NOBODY = np.empty((0, 0), np.float32)


@kernel
def write_means(part, parts, x, labels, weights, sizes, means):
    """Of x (B, T, C) into means (B, G, C). Label -1 belongs to no group; weights (0, 0) count every token once."""
    batch, n_tokens, channels = x.shape
    n_groups = means.shape[1]
    for b in range(part * batch // parts, (part + 1) * batch // parts):
        for g in range(n_groups):
            mean = means[b, g]
            for c in range(channels):
                mean[c] = 0
        for t in range(n_tokens):
            if labels[b, t] < 0:
                continue
            mean, token = means[b, labels[b, t]], x[b, t]
            weight = weights[b, t] if weights.shape[0] else np.float32(1)
            for c in range(channels):
                mean[c] += weight * token[c]
        for g in range(n_groups):
            share = np.float32(1) / max(sizes[b, g], np.float32(1))
            mean = means[b, g]
            for c in range(channels):
                mean[c] *= share


def group_means(x: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor) -> Tensor:
    """Means (B, G, C) of float32 x (B, T, C) by labels (B, T), where sizes (B, G) are the summed weights (B, T)."""
    batch, _, channels = x.shape
    means = torch.empty(batch, sizes.shape[1], channels)
    parts = max(1, min(available(), batch, x.numel() // _NUMBERS_PER_THREAD))
    pulls = _NOBODY if weights is None else weights.contiguous().numpy()
    tokens, groups = x.contiguous().numpy(), labels.contiguous().numpy()
    run(write_means, parts, tokens, groups, pulls, sizes.contiguous().numpy(), means.numpy())
    return means
