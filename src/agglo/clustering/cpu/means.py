"""The weighted mean of the members of each group, in one pass over the tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.cpu.cosine import square_sum
from agglo.clustering.cpu.jit import inner, kernel
from agglo.clustering.cpu.threads import available, run

_NUMBERS_PER_THREAD = 300_000  # for fewer, waking one takes longer than the work
_NOBODY = np.empty((0, 0), np.float32)


@inner
def stretch(b, x, labels, weights, sizes, first, lengths, means):
    """The means of image b, from group `first` on, become as long as their members are on average."""
    length = lengths[b]
    for g in range(first, length.shape[0]):
        length[g] = 0
    for t in range(x.shape[1]):
        if labels[b, t] >= first:
            weight = weights[b, t] if weights.shape[0] else np.float32(1)
            length[labels[b, t]] += weight * np.sqrt(square_sum(x[b, t]))
    for g in range(first, length.shape[0]):
        mean = means[b, g]
        reached = np.sqrt(square_sum(mean))
        if reached > 0:
            factor = length[g] / max(sizes[b, g], np.float32(1)) / reached
            for c in range(mean.shape[0]):
                mean[c] *= factor


@kernel
def write_means(part, parts, x, labels, weights, sizes, first, lengths, means):
    """Of x (B, T, C) into means (B, G, C). Label -1 belongs to no group; weights (0, 0) count every token once.

    lengths: (B, G), room to work in, to stretch the means from group `first` on; (0, 0) leaves them as they are.
    """
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
        if lengths.shape[0]:
            stretch(b, x, labels, weights, sizes, first, lengths, means)


def group_means(
    x: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, preserve_norms_from: int | None = None
) -> Tensor:
    """Means (B, G, C) of float32 x (B, T, C) by labels (B, T), where sizes (B, G) are the summed weights (B, T).

    preserve_norms_from: the first group whose mean becomes as long as its members are on average; None leaves all
        means as they are.
    """
    batch, _, channels = x.shape
    means = torch.empty(batch, sizes.shape[1], channels)
    parts = max(1, min(available(), batch, x.numel() // _NUMBERS_PER_THREAD))
    pulls = _NOBODY if weights is None else weights.contiguous().numpy()
    tokens, groups, counts = x.contiguous().numpy(), labels.contiguous().numpy(), sizes.contiguous().numpy()
    lengths = _NOBODY if preserve_norms_from is None else np.empty(counts.shape, np.float32)
    run(write_means, parts, tokens, groups, pulls, counts, preserve_norms_from or 0, lengths, means.numpy())
    return means
