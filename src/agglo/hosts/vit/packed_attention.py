"""torch's nn.MultiheadAttention taken apart: q, k and v from one packed matrix, and the output projection.

The weights are used as torch's own function uses them, without calling `out_proj` as a module: an adapter around it has
no effect on the dense model either.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.swap import UnsupportedModelError
from agglo.hosts.vit.base import Projected


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


def split_heads(packed: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, d) each, of packed (B, T, 3 * H * d)."""
    # Not unflatten: in an ONNX file written by way of TorchScript it fixes the batch size.
    q, k, v = packed.reshape(*packed.shape[:-1], 3, n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def project(attn: nn.MultiheadAttention, x: Tensor) -> Projected:
    """q, k, v of x (B, T, C), whatever `attn.batch_first` says."""
    require_packed(attn)  # again: an adapter may have come after agglo.apply, and its own weights would not be seen
    q, k, v = split_heads(F.linear(x, attn.in_proj_weight, attn.in_proj_bias), attn.num_heads)
    return Projected(q, k, v, dropout=attn.dropout if attn.training else 0.0)


def output(attn: nn.MultiheadAttention, attended: Tensor) -> Tensor:
    """The output projection of attended (B, H, T, d): (B, T, C)."""
    return F.linear(attended.transpose(1, 2).flatten(2), attn.out_proj.weight, attn.out_proj.bias)
