"""Means of groups in two launches: tokens sorted by group, and a program for each group that adds up its members."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 32, 64
OPTIONS = {"enable_fp_fusion": False}  # products are rounded before they are added, as on the CPU
_NO_GROUP = tl.constexpr(2**30)


@triton.jit(do_not_specialize=["n_tokens", "n_groups", "blocks"])
def order_kernel(
    labels, members, starts, n_tokens, n_groups, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sort tokens by (group, position) into members (B, T), and say where each of the groups starts, (B, G + 1).

    By counting what comes before ROWS tokens and before as many groups: one pass over all pairs.
    """
    item, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    labels += item * n_tokens
    r = block * ROWS + tl.arange(0, ROWS)
    group = tl.load(labels + r, mask=r < n_tokens, other=-1).to(tl.int32)
    n_before = tl.zeros((ROWS,), tl.int32)
    start_of = tl.zeros((ROWS,), tl.int32)
    for column in range(0, n_tokens, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        other = tl.load(labels + c, mask=c < n_tokens, other=-1).to(tl.int32)
        other = tl.where(other < 0, _NO_GROUP, other)[None, :]
        before = (other < group[:, None]) | ((other == group[:, None]) & (c[None, :] < r[:, None]))
        n_before += tl.sum(before.to(tl.int32), axis=1)
        start_of += tl.sum((other < r[:, None]).to(tl.int32), axis=1)
    tl.store(members + item * n_tokens + n_before, r, mask=group >= 0)
    tl.store(starts + item * (n_groups + 1) + r, start_of, mask=r <= n_groups)


@triton.jit(do_not_specialize=["n_tokens", "n_groups"])
def mean_kernel(
    x, weights, sizes, members, starts, means, n_tokens, n_groups, width, item_stride, token_stride,
    WEIGHTED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the weighted mean of one group: the sum over its members, in float32, divided by its size."""
    item, group = (tl.program_id(0) // n_groups).to(tl.int64), tl.program_id(0) % n_groups
    channel = tl.arange(0, CHANNELS)
    real = channel < width
    total = tl.zeros((CHANNELS,), tl.float32)
    first = tl.load(starts + item * (n_groups + 1) + group)
    end = tl.load(starts + item * (n_groups + 1) + group + 1)
    for at in range(first, end):
        token = tl.load(members + item * n_tokens + at)
        row = tl.load(x + item * item_stride + token * token_stride + channel, mask=real, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + item * n_tokens + token)
        total += row
    size = tl.maximum(tl.load(sizes + item * n_groups + group), 1.0)
    mean = tl.div_rn(total, tl.zeros_like(total) + size)
    tl.store(means + (item * n_groups + group) * width + channel, mean, mask=real)


def means(x: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
    """Return the means (B, G, C) of x (B, T, C), as `merge.means` does."""
    batch, n_tokens, width = x.shape
    n_groups = sizes.shape[1]
    result = x.new_empty(batch, n_groups, width)
    if not result.numel():
        return result
    x = x if x.stride(2) == 1 else x.contiguous()
    members = labels.new_empty(batch, n_tokens, dtype=torch.int32)
    starts = labels.new_empty(batch, n_groups + 1, dtype=torch.int32)
    blocks = triton.cdiv(max(n_tokens, n_groups + 1), _ROWS)
    with torch.cuda.device_of(x):
        order_kernel[(batch * blocks,)](
            labels.contiguous(), members, starts, n_tokens, n_groups, blocks, ROWS=_ROWS, COLUMNS=_COLUMNS, **OPTIONS
        )
        mean_kernel[(batch * n_groups,)](
            x, sizes if weights is None else weights.contiguous(), sizes.contiguous(), members, starts, result,
            n_tokens, n_groups, width, *x.stride()[:2],
            WEIGHTED=weights is not None, CHANNELS=triton.next_power_of_2(width), **OPTIONS,
        )  # fmt: skip
    return result
