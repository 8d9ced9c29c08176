"""Proportional attention: a token that stands for s patches weighs as much as s copies of itself.

    softmax(Q K^T * scale + log s) V,   s the size of each key; log 0 = -inf hides padding

Both roads go through scaled_dot_product_attention. The additive bias is simplest, and fastest wherever no flash kernel
runs. Flash kernels take no bias; there the same number travels in one more channel, 1 on the query side and
log(s) / scale on the key side, so that the dot product itself adds it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.compiling import constant_result

Path = Literal["bias", "channel"]

# log(0) in the extra channel: finite, since flash kernels subtract row maxima tile by tile and -inf - -inf is NaN;
# small enough for float16; times any usual scale still far below every logit.
_HIDDEN = -3e4


_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_WIDEST_HEAD = 256
_FLASH_CAPABILITY = (8, 0)  # Ampere; on older GPUs torch has no flash kernel


def fastest_path(device: torch.device, dtype: torch.dtype, width: int) -> Path:
    """The road for queries of so many channels per head, as scaled_dot_product_attention will see them.

    Measured on a CPU at (64, 3, 99, 64) float32: bias 3.9 ms (no bias at all 3.9), channel 6.0; at 197 tokens
    20 against 41. On CUDA a bias rules out the flash kernel, so the channel carries it where that kernel would run.
    Where it would not (float32, heads too wide, an old GPU, flash switched off) one more channel only costs.
    """
    if device.type != "cuda":
        return "bias"
    index = torch.cuda.current_device() if device.index is None else device.index
    return "channel" if flash_kernel_runs(dtype, width, _flash_capability(index)) else "bias"


def flash_kernel_runs(dtype: torch.dtype, width: int, capability: tuple[int, int] | None) -> bool:
    """Whether torch's flash kernel takes heads of so many channels and the extra ones, without mask.

    capability: of the GPU; None where flash kernels are missing or switched off.
    """
    fits = dtype in _FLASH_DTYPES and _padded(width) <= _FLASH_WIDEST_HEAD
    return fits and capability is not None and capability >= _FLASH_CAPABILITY


@constant_result
def _flash_capability(index: int) -> tuple[int, int] | None:
    """Of GPU `index`, if torch has flash kernels and may use them."""
    if not (torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()):
        return None
    return torch.cuda.get_device_capability(index)


def _padded(width: int) -> int:
    """Channels per head with at least one more, in multiples of 8 as flash kernels want them."""
    return width + 8 - width % 8


def proportional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    path: Path | None = None,
) -> Tensor:
    """Attention of q (B, H, M, d) over k, v (B, H, N, d) whose tokens have sizes (B, N): (B, H, M, d).

    sizes None is ordinary attention; scale None is 1 / sqrt(d); path None takes the fastest one.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sizes is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    log_sizes = sizes.float().log()
    if (path or _path_of(q)) == "bias":
        bias = log_sizes.to(q.dtype)[:, None, None, :].expand(-1, -1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return _through_a_channel(q, k, v, log_sizes, scale, dropout)


def _path_of(q: Tensor) -> Path:
    """Autocast, where it is on, decides in which dtype scaled_dot_product_attention takes q."""
    autocast = q.is_cuda and torch.is_autocast_enabled("cuda")
    return fastest_path(q.device, torch.get_autocast_dtype("cuda") if autocast else q.dtype, int(q.shape[-1]))


def _through_a_channel(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, scale: float, dropout: float) -> Tensor:
    width = q.shape[-1]
    padding = _padded(width) - width  # one of these channels is ours
    carried = (log_sizes / scale).clamp(min=_HIDDEN).to(k.dtype)[:, None, :, None].expand(-1, k.shape[1], -1, -1)
    q = torch.cat([q, q.new_ones(*q.shape[:-1], 1), q.new_zeros(*q.shape[:-1], padding - 1)], dim=-1)
    k = torch.cat([k, carried, k.new_zeros(*k.shape[:-1], padding - 1)], dim=-1)
    v = F.pad(v, (0, padding))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)[..., :width]


def class_attention(q: Tensor, k: Tensor, sizes: Tensor | None, *, scale: float | None = None) -> Tensor:
    """How the first token of q (B, H, M, d) attends to every key of k (B, H, N, d): weights (B, H, N).

    In float32, under autocast too: in half precision patches tie that do not, and others are selected.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        logits = (q[:, :, :1].float() @ k.float().transpose(-2, -1)).squeeze(2) * scale
        if sizes is not None:
            logits = logits + sizes.float().log().unsqueeze(1)
        return logits.softmax(dim=-1)


def attention_received(q: Tensor, k: Tensor, sizes: Tensor | None, *, scale: float | None = None) -> Tensor:
    """How much attention each key of k (B, H, N, d) gets from all queries of q (B, H, M, d), summed over heads: (B, N).

    In float32, under autocast too. Padding, of size 0, does not ask.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        logits = (q.float() @ k.float().transpose(-2, -1)) * scale
        if sizes is None:
            return logits.softmax(dim=-1).sum(dim=(1, 2))
        weights = (logits + sizes.float().log()[:, None, None]).softmax(dim=-1)
        return (weights * (sizes > 0)[:, None, :, None]).sum(dim=(1, 2))


def policy_attention(
    q: Tensor, k: Tensor, v: Tensor, policy: Tensor, *, scale: float | None = None, eps: float = 1e-6
) -> Tensor:
    """DynamicViT's attention in training: tokens with policy 0 (B, T) are seen by nobody but themselves.

        e_ij = exp(a_ij - max_j a_ij) * (policy_j, or 1 where i = j)
        out_i = sum_j (e_ij + eps / T) / (sum_j e_ij + eps) v_j

    In float32 with all weights written out, so that gradients reach the policy. (B, H, T, d) each.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n_tokens = q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        logits = (q.float() @ k.float().transpose(-2, -1)) * scale
        itself = torch.eye(n_tokens, device=q.device)
        seen = policy.float()[:, None, None, :]
        exponentials = (logits - logits.amax(dim=-1, keepdim=True)).exp() * (seen * (1 - itself) + itself)
        weights = (exponentials + eps / n_tokens) / (exponentials.sum(dim=-1, keepdim=True) + eps)
        return (weights @ v.float()).to(v.dtype)
