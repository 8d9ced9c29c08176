"""Unit vectors, and from their products to distances: one pass over memory each, where torch takes three."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.cpu.jit import inner, inner_sum, kernel
from agglo.clustering.cpu.threads import available, run

# Squares within these sum up without overflow, and without losing digits to subnormal numbers.
_LEAST, _MOST = np.float32(1e-25), np.float32(1e25)
_NUMBERS_PER_THREAD = 300_000  # for fewer, waking one takes longer than the work


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
    """Rows (R, D) of length 1 into units; zero, infinite and NaN rows become NaN."""
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


@kernel
def become_distances(part, parts, products):
    """Products (B, N, N) of unit vectors to cosine distances, in place."""
    batch, n, _ = products.shape
    for r in range(part * batch * n // parts, (part + 1) * batch * n // parts):
        line = products[r // n, r % n]
        for c in range(n):
            line[c] = max(np.float32(1) - line[c], np.float32(0))


def unit_rows(features: Tensor) -> Tensor:
    """Float32 features (B, N, D) with every token of length 1."""
    rows = features.reshape(-1, features.shape[-1]).contiguous()
    units = torch.empty_like(rows)
    parts = max(1, min(available(), rows.numel() // _NUMBERS_PER_THREAD))
    run(write_units, parts, rows.numpy(), units.numpy())
    return units.view(features.shape)
