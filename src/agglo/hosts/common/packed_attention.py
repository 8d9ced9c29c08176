"""torch's nn.MultiheadAttention taken apart: q, k and v from one packed matrix, and the output projection.

The weights are used as torch's own function uses them, without calling `out_proj` as a module: an adapter around it has
no effect on the dense model either.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.blocks import Projected, front_and_rest, split_heads
from agglo.hosts.common.swap import UnsupportedModelError


def require_packed(attn: Any) -> None:
    """Raise UnsupportedModelError unless a block's attention is plain self-attention of the shape handled here."""
    if type(attn) is not nn.MultiheadAttention:
        raise UnsupportedModelError(
            f"a block attends by {type(attn).__name__} (from {type(attn).__module__}); supported: "
            "torch.nn.MultiheadAttention. Adapters around it must be merged into the weights first"
        )
    if attn.in_proj_weight is None or attn.bias_k is not None or attn.add_zero_attn:
        raise UnsupportedModelError(
            "a block attends by a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn; "
            "supported: one packed in_proj_weight and nothing else"
        )


def packed_qkv(attn: Any, x: Tensor, n_front: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, T, d) of x (B, T, C); q of the first n_front tokens alone if that is given."""
    weight, bias, n_heads = attn.in_proj_weight, attn.in_proj_bias, attn.num_heads
    if n_front is None:
        q, k, v = split_heads(F.linear(x, weight, bias), n_heads, 3)
    else:
        front, rest = front_and_rest(x, weight, bias, n_front)
        (q,), (k, v) = split_heads(front, n_heads, 1), split_heads(rest, n_heads, 2)
    return q, k, v


def project(attn: nn.MultiheadAttention, x: Tensor, n_front: int | None = None) -> Projected:
    """Return q, k, v of x (B, T, C), whatever `attn.batch_first` says. n_front: as for `packed_qkv`."""
    require_packed(attn)  # again: an adapter may have come after agglo.apply, and its own weights would not be seen
    return Projected(*packed_qkv(attn, x, n_front), dropout=attn.dropout if attn.training else 0.0)


def query_side_params(attn: Any) -> int:
    """Return the matrix entries of the query's and the output projection."""
    return int(attn.in_proj_weight.numel()) // 3 + int(attn.out_proj.weight.numel())


def output(attn: nn.MultiheadAttention, attended: Tensor) -> Tensor:
    """Return the output projection (B, T, C) of attended (B, H, T, d)."""
    return F.linear(attended.transpose(1, 2).flatten(2), attn.out_proj.weight, attn.out_proj.bias)
