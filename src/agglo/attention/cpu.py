"""The class token's dot products with all keys on the CPU, without a copy of the keys."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from agglo.clustering.jit import as_numbers, inner, kernel
from agglo.clustering.threads import run

_KEYS_PER_PART = 8_000  # for fewer, waking a thread takes longer than the work
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
