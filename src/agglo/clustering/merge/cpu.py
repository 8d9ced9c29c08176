"""Sizes of groups and means of tokens on the CPU, each in one pass over the tokens.

`agglo.grouping` says what they are, by torch's operators, which serve every device, gradients and graphs; at one image
of 197 tokens those take twenty calls, and longer than the clustering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.distances.cpu import CosineDistances, square_sum
from agglo.clustering.kernels import inner, kernel, run
from agglo.clustering.linkage.cpu import find_labels
from agglo.clustering.linkage.cpu.keys import FAR

_NUMBERS_PER_PART = 300_000  # for fewer, waking a thread takes longer than the work
_NONE = np.empty((0, 0), np.float32)
_NO_TOKENS: tuple[Any, ...] = np.empty((0, 0, 0), np.float32), False, np.empty((0, 0, 0), np.float32), _NONE


@kernel
def write_groups(part, parts, patch_labels, prefix, weights, labels, sizes, x, preserve_norm, means, lengths):
    """Write labels (B, T) with the prefix tokens in front, sizes (B, G), and the means (B, G, C) of tokens (B, T, C).

    Without tokens, x of no image, there are no means. Labels of patches beyond the last group are those of the last.
    """
    n, n_groups = labels.shape[0], sizes.shape[1]
    for b in range(part * n // parts, (part + 1) * n // parts):
        for g in range(n_groups):
            sizes[b, g] = 0
        for t in range(labels.shape[1]):
            label = t
            if t >= prefix:
                label = patch_labels[b, t - prefix]
                label = min(label + prefix, n_groups - 1) if label >= 0 else -1
            labels[b, t] = label
            if label >= 0:
                sizes[b, label] += weights[b, t] if weights.shape[0] > 0 else np.float32(1)
        if x.shape[0] > 0:
            write_means(x[b], labels[b], weights, b, sizes[b], prefix, preserve_norm, means[b], lengths[b])


@inner
def write_means(x, labels, weights, b, sizes, prefix, preserve_norm, means, lengths):
    """Write the size-weighted means (G, C) of an image's tokens (T, C), as long as their members if asked to."""
    for g in range(means.shape[0]):
        total = means[g]
        lengths[g] = 0
        for c in range(total.shape[0]):
            total[c] = 0
    for t in range(labels.shape[0]):
        g = labels[t]
        if g < 0:
            continue
        token, total = x[t], means[g]
        weight = weights[b, t] if weights.shape[0] > 0 else np.float32(1)
        for c in range(token.shape[0]):
            total[c] += token[c] * weight
        if preserve_norm and g >= prefix:
            lengths[g] += np.sqrt(square_sum(token)) * weight
    for g in range(means.shape[0]):
        total, size = means[g], max(sizes[g], np.float32(1))
        for c in range(total.shape[0]):
            total[c] /= size
        if preserve_norm and g >= prefix:
            reached = np.sqrt(square_sum(total))
            stretch = lengths[g] / size / reached if reached > 0 else np.float32(1)
            for c in range(total.shape[0]):
                total[c] *= stretch


@kernel
def write_all_means(part, parts, x, labels, weights, sizes, prefix, preserve_norm, means, lengths):
    """Write the means (B, G, C) of tokens (B, T, C) by labels (B, T) of all tokens."""
    n = labels.shape[0]
    for b in range(part * n // parts, (part + 1) * n // parts):
        write_means(x[b], labels[b], weights, b, sizes[b], prefix, preserve_norm, means[b], lengths[b])


def group(
    patch_labels: np.ndarray,
    n_groups: int,
    prefix: int,
    weights: Tensor | None,
    x: Tensor | None = None,
    preserve_norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return labels (B, T) of all tokens, from those of the patches, sizes (B, G), and any means (B, G, C)."""
    batch, n_patches = patch_labels.shape
    labels, sizes = torch.empty((batch, prefix + n_patches), dtype=torch.int64), torch.empty((batch, prefix + n_groups))
    means, parts = None, 1
    arrays = _NO_TOKENS
    if x is not None:
        means, parts = torch.empty((batch, prefix + n_groups, x.shape[2])), _parts_for(x)
        arrays = x.contiguous().numpy(), preserve_norm, means.numpy(), np.empty(sizes.shape, np.float32)
    given = _NONE if weights is None else weights.contiguous().numpy()
    run(write_groups, parts, patch_labels, prefix, given, labels.numpy(), sizes.numpy(), *arrays)
    return labels, sizes, means


def means(x: Tensor, labels: Tensor, weights: Tensor | None, sizes: Tensor, prefix: int, preserve_norm: bool) -> Tensor:
    """Return the means (B, G, C) of tokens x (B, T, C), float32, by group."""
    batch, n_groups = sizes.shape
    found, lengths = torch.empty((batch, n_groups, x.shape[2])), np.empty((batch, n_groups), np.float32)
    given = _NONE if weights is None else weights.contiguous().numpy()
    arrays = x.contiguous().numpy(), labels.contiguous().numpy(), given, sizes.contiguous().numpy()
    run(write_all_means, _parts_for(x), *arrays, prefix, preserve_norm, found.numpy(), lengths)
    return found


def cluster_and_merge(
    x: Tensor,
    features: Tensor,
    weights: Tensor | None,
    n_groups: int,
    linkage: str,
    sizes: Tensor | None,
    prefix: int,
    preserve_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster the patches of tokens x (B, T, C) by features, (B, N, D) or (B, H, N, D), and merge them.

    Returns:
        Labels (B, T), sizes (B, G) and means (B, G, C) in the dtype of x.
    """
    features = features if features.dim() == 4 else features.unsqueeze(1)
    counts = np.full(len(x), min(n_groups, features.shape[2]), np.int64)
    found = find_labels(CosineDistances(features.float(), weights), linkage, counts, FAR)
    labels, sizes, merged = group(found, n_groups, prefix, sizes, x.float(), preserve_norm)
    assert merged is not None
    return labels, sizes, merged.to(x.dtype)


def _parts_for(x: Tensor) -> int:
    return max(1, min(len(x), torch.get_num_threads(), x.numel() // _NUMBERS_PER_PART))
