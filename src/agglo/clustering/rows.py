"""CPU kernels over rows of float32 numbers: unit vectors, cosine distances, weights, means. One pass over memory each.

Weighted distances are written just before an image is clustered, while it is in cache, in the same pass that turns
products into distances where there are products.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.jit import inner, inner_sum, kernel
from agglo.clustering.threads import run

# Squares within these sum up without overflow, and without losing digits to subnormal numbers.
_LEAST, _MOST = np.float32(1e-25), np.float32(1e25)
_NUMBERS_PER_THREAD = 300_000  # for fewer, waking a thread takes longer than the work
_NONE = np.empty((0, 0), np.float32)


def _parts(x: Tensor, most: int) -> int:
    return max(1, min(torch.get_num_threads(), most, x.numel() // _NUMBERS_PER_THREAD))


@inner_sum
def square_sum(row):
    total = np.float32(0)
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    return total


@inner
def careful_norm(row):
    """The length of a row whose float32 squares would vanish or overflow."""
    total = np.float64(0)
    for c in range(row.shape[0]):
        total += np.float64(row[c]) * np.float64(row[c])
    return np.sqrt(total)


@kernel
def write_units(part, parts, rows, units):
    """Write rows (R, D), scaled to length 1, into units; zero, infinite and NaN rows become NaN."""
    n = rows.shape[0]
    for r in range(part * n // parts, (part + 1) * n // parts):
        row, unit = rows[r], units[r]
        squares = square_sum(row)
        if _LEAST < squares < _MOST:
            shrink = np.float32(1 / np.sqrt(np.float64(squares)))
            for c in range(row.shape[0]):
                unit[c] = row[c] * shrink
        else:
            norm = careful_norm(row)
            for c in range(row.shape[0]):
                unit[c] = np.float32(np.float64(row[c]) / norm)


def unit_rows(features: Tensor) -> Tensor:
    """Scale float32 features (B, N, D) to length 1, every token."""
    rows = features.reshape(-1, features.shape[-1]).contiguous()
    units = torch.empty_like(rows)
    run(write_units, _parts(rows, len(rows) or 1), rows.numpy(), units.numpy())
    return units.view(features.shape)


@inner
def heavier(one, two):
    return one if one > two else two


@kernel
def write_distances(part, parts, given, weights, are_products, out):
    """Turn products (B, N, N) of unit vectors into cosine distances in place, or write weighted distances into out.

    Weights (B, N) multiply the distances; (0, 0) leaves those of products as they are.
    """
    batch, n, _ = given.shape
    for r in range(part * batch * n // parts, (part + 1) * batch * n // parts):
        line = given[r // n, r % n]
        if are_products:
            for c in range(n):
                line[c] = max(np.float32(1) - line[c], np.float32(0))
        if weights.shape[0]:
            target, others = out[r // n, r % n], weights[r // n]
            own = others[r % n]
            if are_products:  # a loop of its own, as LLVM does not vectorise from one array into the very same
                for c in range(n):
                    line[c] *= heavier(own, others[c])
            else:
                for c in range(n):
                    target[c] = line[c] * heavier(own, others[c])


@inner
def stretch(b, x, labels, weights, sizes, first, lengths, means):
    """Make the means of image b, from group `first` on, as long as their members are on average."""
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
    """Write the means (B, G, C) of x (B, T, C). Label -1 is no group; weights (0, 0) count every token once.

    lengths (B, G) is scratch to stretch the means from group `first` on; (0, 0) leaves them as they are.
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
    """Return the weighted mean of the members of each group.

    Args:
        x: tokens (B, T, C), float32.
        labels: the group of every token (B, T), or -1 for none.
        weights: (B, T), or None to count every token once.
        sizes: (B, G), the summed weights of each group.
        preserve_norms_from: the first group whose mean is stretched to the mean length of its members; None stretches
            none.

    Returns:
        Means (B, G, C).
    """
    means = torch.empty(len(x), sizes.shape[1], x.shape[2])
    own_weights = _NONE if weights is None else weights.contiguous().numpy()
    tokens, groups, counts = x.contiguous().numpy(), labels.contiguous().numpy(), sizes.contiguous().numpy()
    lengths = _NONE if preserve_norms_from is None else np.empty(counts.shape, np.float32)
    first = preserve_norms_from or 0
    run(write_means, _parts(x, len(x)), tokens, groups, own_weights, counts, first, lengths, means.numpy())
    return means
