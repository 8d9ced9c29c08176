"""torch's nn.MultiheadAttention taken apart: q, k and v from one packed matrix, and the output projection.

The weights are used as torch's own function uses them, without calling `out_proj` as a module: an adapter around it has
no effect on the dense model either.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.blocks import Projected
from agglo.hosts.common.readers import linear_rows
from agglo.hosts.common.swap import UnsupportedModelError


def require_packed(attn: Any) -> None:
    """UnsupportedModelError unless a block's attention is plain self-attention of the shape handled here."""
    if type(attn) is not nn.MultiheadAttention:
        cls = type(attn)
        raise UnsupportedModelError(
            f"a block attends by {cls.__name__} (from {cls.__module__}); supported: torch.nn.MultiheadAttention. "
            "Adapters around it must be merged into the weights first"
        )
    if attn.in_proj_weight is None or attn.bias_k is not None or attn.add_zero_attn:
        raise UnsupportedModelError(
            "a block attends by a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn; "
            "supported: one packed in_proj_weight and nothing else"
        )


def packed_qkv(attn: Any, x: Tensor, n_front: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d) each, of x (B, T, C); q of the first n_front tokens alone if that is given."""
    weight, bias, n_heads = attn.in_proj_weight, attn.in_proj_bias, attn.num_heads
    if n_front is None:
        # Not unflatten: in an ONNX file written by way of TorchScript it fixes the batch size.
        packed = F.linear(x, weight, bias)
        q, k, v = packed.reshape(*packed.shape[:-1], 3, n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    width = weight.shape[0] // 3
    asking = linear_rows(x[:, :n_front], weight, bias, slice(width))
    asked = linear_rows(x, weight, bias, slice(width, None))
    k, v = asked.reshape(*asked.shape[:-1], 2, n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return asking.reshape(*asking.shape[:-1], n_heads, -1).transpose(1, 2), k, v


def project(attn: nn.MultiheadAttention, x: Tensor, n_front: int | None = None) -> Projected:
    """q, k, v of x (B, T, C), whatever `attn.batch_first` says. n_front: as for `packed_qkv`."""
    require_packed(attn)  # again: an adapter may have come after agglo.apply, and its own weights would not be seen
    q, k, v = packed_qkv(attn, x, n_front)
    return Projected(q, k, v, dropout=attn.dropout if attn.training else 0.0)


def query_side_params(attn: Any) -> int:
    """Matrix entries of the query's and the output projection."""
    return int(attn.in_proj_weight.numel()) // 3 + int(attn.out_proj.weight.numel())


def output(attn: nn.MultiheadAttention, attended: Tensor) -> Tensor:
    """The output projection of attended (B, H, T, d): (B, T, C)."""
    return F.linear(attended.transpose(1, 2).flatten(2), attn.out_proj.weight, attn.out_proj.bias)
