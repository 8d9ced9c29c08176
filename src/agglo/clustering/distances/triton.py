"""From the keys of all heads to cosine distances in two launches, whatever precision torch's products have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _CHANNELS = 32, 32  # rows and columns of distances per program; channels multiplied at once
_MEAN_VALUES = 2048  # per program
DISTANCE_OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}
MEAN_OPTIONS = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["n_tokens", "blocks"])
def head_mean_kernel(
    x, means, n_tokens, n_heads, width, item_stride, head_stride, token_stride, blocks,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the means (B, N, d) float32 over the heads of x (B, H, N, d), for ROWS tokens."""
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    token, channel = block * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    real = (token < n_tokens) & (channel < width)
    at = x + item * item_stride + token * token_stride + channel
    total = tl.load(at, mask=real, other=0.0).to(tl.float32)
    for head in range(1, n_heads):
        total += tl.load(at + head * head_stride, mask=real, other=0.0).to(tl.float32)
    mean = tl.div_rn(total, tl.zeros_like(total) + n_heads)
    tl.store(means + (item * n_tokens + token) * width + channel, mean, mask=real)


@triton.jit
def _lengths(rows, token, n_tokens, width, TILE: tl.constexpr, CHANNELS: tl.constexpr):
    """Each row's largest entry, and its length once divided by that: no square vanishes or overflows."""
    largest = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        real = (token < n_tokens)[:, None] & (channel < width)[None, :]
        x = tl.load(rows + token[:, None] * width + channel[None, :], mask=real, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    squares = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        real = (token < n_tokens)[:, None] & (channel < width)[None, :]
        x = tl.load(rows + token[:, None] * width + channel[None, :], mask=real, other=0.0).to(tl.float32)
        x = x / largest[:, None]
        squares += tl.sum(x * x, axis=1)
    return largest, tl.sqrt(squares)


@triton.jit(do_not_specialize=["n_tokens", "blocks"])
def distance_kernel(
    rows, weights, distances, n_tokens, width, blocks,
    WEIGHTED: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write one tile of 1 - cos, at least 0, of rows (B, N, D) in float32, and its mirror image; see `weighted`."""
    item, above = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    if tl.program_id(1) < above:
        return
    rows += item * n_tokens * width
    i, j = above * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    i_largest, i_length = _lengths(rows, i, n_tokens, width, TILE, CHANNELS)
    j_largest, j_length = _lengths(rows, j, n_tokens, width, TILE, CHANNELS)
    product = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        i_real = (i < n_tokens)[:, None] & (channel < width)[None, :]
        j_real = (channel < width)[:, None] & (j < n_tokens)[None, :]
        x = tl.load(rows + i[:, None] * width + channel[None, :], mask=i_real, other=0.0)
        y = tl.load(rows + j[None, :] * width + channel[:, None], mask=j_real, other=0.0)
        x = x.to(tl.float32) / i_largest[:, None] / i_length[:, None]
        y = y.to(tl.float32) / j_largest[None, :] / j_length[None, :]
        product = tl.dot(x, y, product, input_precision="ieee")
    distance = 1.0 - product
    distance = tl.where(distance < 0.0, 0.0, distance)  # NaN stays
    if WEIGHTED:
        i_weight = tl.load(weights + item * n_tokens + i, mask=i < n_tokens, other=0.0)
        j_weight = tl.load(weights + item * n_tokens + j, mask=j < n_tokens, other=0.0)
        distance *= tl.maximum(i_weight[:, None], j_weight[None, :])
    distances += item * n_tokens * n_tokens
    real = (i < n_tokens)[:, None] & (j < n_tokens)[None, :]
    tl.store(distances + i[:, None] * n_tokens + j[None, :], distance, mask=real)
    tl.store(distances + j[None, :] * n_tokens + i[:, None], distance, mask=real & (i[:, None] < j[None, :]))


def head_means(x: Tensor) -> Tensor:
    """Return the means (B, N, d) float32 over the heads of x (B, H, N, d)."""
    x = x.detach() if x.stride(3) == 1 else x.detach().contiguous()
    batch, n_heads, n_tokens, width = x.shape
    means = x.new_empty(batch, n_tokens, width, dtype=torch.float32)
    channels = triton.next_power_of_2(width)
    rows = max(1, _MEAN_VALUES // channels)
    blocks = triton.cdiv(n_tokens, rows)
    if means.numel():
        with torch.cuda.device_of(x):
            head_mean_kernel[(batch * blocks,)](
                x,
                means,
                n_tokens,
                n_heads,
                width,
                *x.stride()[:3],
                blocks,
                ROWS=rows,
                CHANNELS=channels,
                **MEAN_OPTIONS,
            )
    return means


def distances(features: Tensor, weights: Tensor | None) -> Tensor:
    """Return float32 distances (B, N, N) of features (B, N, D), times the larger weight (B, N) of each pair."""
    features = features.detach().contiguous()
    batch, n_tokens, width = features.shape
    result = features.new_empty(batch, n_tokens, n_tokens, dtype=torch.float32)
    blocks = triton.cdiv(n_tokens, _TILE)
    if result.numel():
        with torch.cuda.device_of(features):
            distance_kernel[(batch * blocks, blocks)](
                features, result if weights is None else weights.contiguous(), result, n_tokens, width, blocks,
                WEIGHTED=weights is not None, TILE=_TILE, CHANNELS=_CHANNELS, **DISTANCE_OPTIONS,
            )  # fmt: skip
    return result
