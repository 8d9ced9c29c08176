"""What the class token's attention tells, on the CPU: its dot products with all keys, and weights made of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.kernels import as_numbers, inner, kernel, run

_KEYS_PER_PART = 8_000  # for fewer, waking a thread takes longer than the work
_TINY = np.finfo(np.float32).tiny
_NONE = np.empty((0, 0), np.float32)


@partial(inner, fastmath={"reassoc", "contract"})  # sums in any order, which lets them use vector instructions
def dot(x, y):
    total = np.float32(0)
    for c in range(x.shape[0]):
        total += x[c] * y[c]
    return total


@kernel
def write_logits(part, parts, q, k, layout, scale, log_sizes, logits):
    """Write the logits (B, H, N) of the first query of every head; layout: strides of q and k, width."""
    q_image, q_head, k_image, k_head, k_token, width = layout
    batch, n_heads, n = logits.shape
    for b in range(part * batch // parts, (part + 1) * batch // parts):
        for h in range(n_heads):
            at = b * q_image + h * q_head
            query, row = q[at : at + width], logits[b, h]
            for t in range(n):
                at = b * k_image + h * k_head + t * k_token
                row[t] = dot(query, k[at : at + width]) * scale
                if log_sizes.shape[0] > 0:
                    row[t] += log_sizes[b, t]


def class_logits(q: Tensor, k: Tensor, log_sizes: Tensor | None, scale: float) -> Tensor:
    """Return the logits (B, H, N) of the first query of float32 q (B, H, M, d) and all keys k (B, H, N, d)."""
    batch, n_heads, n, width = k.shape
    logits = torch.empty(batch, n_heads, n)
    (q_numbers, q_strides), (k_numbers, k_strides) = as_numbers(q[:, :, 0]), as_numbers(k)
    sizes = _NONE if log_sizes is None else log_sizes.contiguous().numpy()
    parts = max(1, min(batch, torch.get_num_threads(), batch * n_heads * n // _KEYS_PER_PART))
    layout = (*q_strides[:2], *k_strides[:3], width)
    run(write_logits, parts, q_numbers, k_numbers, layout, np.float32(scale), sizes, logits.numpy())
    return logits


@kernel
def write_weights(attention, prefix, exponent, weights):
    """Write (a / mean of a) ** exponent (B, N), a the attention (B, H, T) to each patch token, summed over heads."""
    n_heads = attention.shape[1]
    for b in range(weights.shape[0]):
        row, total = weights[b], np.float32(0)
        for n in range(row.shape[0]):
            to_patch = np.float32(0)
            for h in range(n_heads):
                to_patch += attention[b, h, prefix + n]
            row[n] = to_patch
            total += to_patch
        scale = np.float32(row.shape[0]) / max(total, _TINY)
        for n in range(row.shape[0]):
            row[n] = np.sqrt(row[n] * scale) if exponent == 0.5 else (row[n] * scale) ** np.float32(exponent)


def patch_weights(attention: Tensor, prefix: int, exponent: float) -> Tensor:
    """Return (a / mean of a) ** exponent (B, N), a the attention (B, H, T) to each patch token, summed over heads."""
    batch, _, n_tokens = attention.shape
    weights = torch.empty(batch, n_tokens - prefix)
    write_weights(attention.contiguous().numpy(), prefix, float(exponent), weights.numpy())
    return weights
