"""Weighted distances: each times the larger one of its two tokens' weights, one float32 product.

Written just before an image is clustered, while it is in cache, and where there are products to turn into distances, in
the same pass. Everything after that works on weighted distances as on any others: `certainty` bounds what was rounded
since, in units in the last place of what it compares, so nothing there depends on the weights.
"""

from __future__ import annotations

import numpy as np

from agglo.clustering.cpu.jit import inner, kernel


@inner
def heavier(one, two):
    return one if one > two else two


@kernel
def become_weighted_distances(part, parts, products, weights):
    """Products (B, N, N) of unit vectors to cosine distances with weights (B, N), in place."""
    batch, n, _ = products.shape
    for r in range(part * batch * n // parts, (part + 1) * batch * n // parts):
        line, others = products[r // n, r % n], weights[r // n]
        own = others[r % n]
        for c in range(n):
            line[c] = max(np.float32(1) - line[c], np.float32(0)) * heavier(own, others[c])


@kernel
def write_weighted(part, parts, distances, weights, out):
    """Distances (B, N, N) with weights (B, N), into out (B, N, N)."""
    batch, n, _ = distances.shape
    for r in range(part * batch * n // parts, (part + 1) * batch * n // parts):
        line, others, target = distances[r // n, r % n], weights[r // n], out[r // n, r % n]
        own = others[r % n]
        for c in range(n):
            target[c] = line[c] * heavier(own, others[c])
