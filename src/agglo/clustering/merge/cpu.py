"""Sizes of groups and means of tokens on the CPU, each in one pass over the tokens.

`agglo.grouping` says what they are, by torch's operators, which serve every device, gradients and graphs; at one image
of 197 tokens those take twenty calls, and longer than the clustering.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances.cpu import square_sum
from agglo.clustering.jit import kernel
from agglo.clustering.threads import run

_NUMBERS_PER_PART = 300_000  # for fewer, waking a thread takes longer than the work
_NONE = np.empty((0, 0), np.float32)


@kernel
def write_sizes(patch_labels, prefix, weights, labels, sizes):
    """Write labels (B, T) with the prefix tokens in front, and the sizes (B, G) of the groups."""
    for b in range(labels.shape[0]):
        for g in range(sizes.shape[1]):
            sizes[b, g] = 0
        for t in range(labels.shape[1]):
            label = t if t < prefix else patch_labels[b, t - prefix]
            label += prefix if t >= prefix and label >= 0 else 0
            labels[b, t] = label
            if label >= 0:
                sizes[b, label] += weights[b, t] if weights.shape[0] > 0 else np.float32(1)


@kernel
def write_means(part, parts, x, labels, weights, sizes, prefix, preserve_norm, means, lengths):
    """Write the size-weighted means (B, G, C) of tokens x (B, T, C), as long as their members if asked to."""
    n = labels.shape[0]
    for b in range(part * n // parts, (part + 1) * n // parts):
        out = means[b]
        for g in range(out.shape[0]):
            lengths[b, g] = 0
            for c in range(out.shape[1]):
                out[g, c] = 0
        for t in range(labels.shape[1]):
            g = labels[b, t]
            if g < 0:
                continue
            token, total = x[b, t], out[g]
            weight = weights[b, t] if weights.shape[0] > 0 else np.float32(1)
            for c in range(token.shape[0]):
                total[c] += token[c] * weight
            if preserve_norm and g >= prefix:
                lengths[b, g] += np.sqrt(square_sum(token)) * weight
        for g in range(out.shape[0]):
            total, size = out[g], max(sizes[b, g], np.float32(1))
            for c in range(total.shape[0]):
                total[c] /= size
            if preserve_norm and g >= prefix:
                reached = np.sqrt(square_sum(total))
                stretch = lengths[b, g] / size / reached if reached > 0 else np.float32(1)
                for c in range(total.shape[0]):
                    total[c] *= stretch


def sizes(patch_labels: Tensor, n_groups: int, prefix: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return labels (B, T) of all tokens, from those of the patches, and the sizes (B, prefix + n_groups)."""
    batch, n_patches = patch_labels.shape
    labels = torch.empty((batch, prefix + n_patches), dtype=torch.int64)
    found = torch.empty((batch, prefix + n_groups))
    given = _NONE if weights is None else weights.contiguous().numpy()
    write_sizes(patch_labels.contiguous().numpy(), prefix, given, labels.numpy(), found.numpy())
    return labels, found


def means(
    x: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, prefix: int, preserve_norm: bool
) -> Tensor:
    """Return the means (B, G, C) of tokens x (B, T, C), float32, by group."""
    batch, n_groups = sizes.shape
    found, lengths = torch.empty((batch, n_groups, x.shape[2])), np.empty((batch, n_groups), np.float32)
    parts = max(1, min(batch, torch.get_num_threads(), x.numel() // _NUMBERS_PER_PART))
    given = _NONE if weights is None else weights.contiguous().numpy()
    arrays = x.contiguous().numpy(), labels.contiguous().numpy(), given, sizes.contiguous().numpy()
    run(write_means, parts, *arrays, prefix, preserve_norm, found.numpy(), lengths)
    return found
