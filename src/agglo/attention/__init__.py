"""Proportional attention: a token that stands for s patches weighs as much as s copies of itself.

    softmax(Q K^T * scale + bias + log s) V,   s the size of each key; log 0 = -inf hides padding

The bias, (B or 1, H or 1, M, N), is that of models with relative positions; most have none.

On every device this is scaled_dot_product_attention with a mask. On CUDA the mask rules out the flash kernel and leaves
the memory-efficient one. The same number could travel through the flash kernel in one more channel, 1 on the query side
and log(s) / scale on the key side; but that copies q, k and v in every block, and the mask costs a launch or none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.compiling import takes_kernels

_ALIGNED = 8  # numbers; unless a mask's rows begin at such multiples, attention on CUDA copies it first


class LogSizes:
    """The logarithms of sizes (B, N), and the masks made of them: each computed once, for all blocks up to a merge."""

    def __init__(self, sizes: Tensor) -> None:
        self.values = sizes.float().log()
        self._rows: dict[torch.dtype, Tensor] = {}

    def mask(self, q: Tensor) -> Tensor:
        """Return the mask (B, 1, M, N) that adds them to the logits of queries (B, H, M, d)."""
        dtype, n_keys = q.dtype, self.values.shape[1]
        if q.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")  # or autocast would write a row for every query
        if dtype not in self._rows:
            row = self.values.to(dtype)
            self._rows[dtype] = F.pad(row, (0, -n_keys % _ALIGNED)) if q.is_cuda and n_keys % _ALIGNED else row
        return self._rows[dtype][:, None, None, :n_keys].expand(-1, -1, q.shape[2], -1)


def proportional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    log_sizes: LogSizes | None = None,
) -> Tensor:
    """Return attention of q (B, H, M, d) over k, v (B, H, N, d), whose tokens have sizes (B, N): (B, H, M, d).

    sizes None is ordinary attention; scale None is 1 / sqrt(d); log_sizes spares the logarithm of the sizes where it is
    known.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = bias
    if sizes is not None:
        log_sizes = LogSizes(sizes) if log_sizes is None else log_sizes
        mask = log_sizes.mask(q) if bias is None else bias.float() + log_sizes.values[:, None, None, :]
    mask = None if mask is None else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def class_attention(
    q: Tensor,
    k: Tensor,
    sizes: Tensor | None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    log_sizes: LogSizes | None = None,
) -> Tensor:
    """Return how the first token of q (B, H, M, d) attends to every key of k (B, H, N, d): weights (B, H, N).

    In float32, under autocast too: half precision would make ties, and select other patches.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logs = None
    if sizes is not None:
        logs = sizes.float().log() if log_sizes is None else log_sizes.values
    if bias is None and takes_kernels(q, k, sizes):
        from agglo.attention import cpu  # compiled kernels load when they are needed

        return cpu.class_logits(q[:, :, :1].float(), k.float(), logs, scale).softmax(dim=-1)
    with torch.autocast(q.device.type, enabled=False):
        logits = (q[:, :, :1].float() @ k.float().transpose(-2, -1)).squeeze(2) * scale
        if logs is not None:
            logits = logits + logs.unsqueeze(1)
        if bias is not None:
            logits = logits + bias[:, :, 0].float()
        return logits.softmax(dim=-1)


@torch.no_grad()
def attention_received(
    q: Tensor, k: Tensor, sizes: Tensor | None, *, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return how much attention each key (B, H, N, d) gets from all queries (B, H, M, d) of all heads: (B, N).

    In float32, under autocast too, and without gradient. Padding, of size 0, counts for no query. Weights are written
    out for a few images and heads at a time only.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _in_pieces(q, k, None, sizes, scale, bias)[1]


def attention_with_received(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `proportional_attention` and, of the same queries and keys, `attention_received`.

    On a CPU one pass gives both: the weights of a few images are written out, summed, and multiplied with the values
    while they are in the cache. At (64, 3, 197, 64) float32 that takes 1.3 to 1.4 times as long as attention alone,
    where a second pass for the sums takes 0.8 to 0.9 of it more.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu")
    differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    plain = all(type(each) is Tensor and each.dtype == torch.float32 for each in (q, k, v))
    if q.device.type == "cpu" and plain and not (in_graph or differentiated or dropout):
        return _in_pieces(q, k, v, sizes, scale, bias)
    attended = proportional_attention(q, k, v, sizes, scale=scale, dropout=dropout, bias=bias)
    return attended, attention_received(q, k, sizes, scale=scale, bias=bias)


_CACHE = 2 * 2**20  # bytes of attention weights at once: what stays in a core's cache
_MEMORY = 256 * 2**20  # and on other devices, where few large steps are faster


def _in_pieces(
    q: Tensor, k: Tensor, v: Tensor | None, sizes: Tensor | None, scale: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write out the attention weights piece by piece: return what they make of v (q if None), and their sums (B, N)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, n_heads, n_queries, _ = q.shape
    received = torch.zeros(batch, k.shape[2], device=k.device)
    attended = q
    if v is not None:
        attended = q.new_empty(batch, n_queries, n_heads, v.shape[-1]).transpose(1, 2)  # as blocks join the heads
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    for images, heads in [(slice(None), slice(None))] if in_graph else _pieces(q, k):
        logits = (q[images, heads].float() * scale) @ k[images, heads].float().transpose(-2, -1)
        if bias is not None:
            logits += bias.expand(batch, n_heads, -1, -1)[images, heads].float()
        here = None if sizes is None else sizes[images]
        if here is not None:
            logits += here.float().log()[:, None, None]
        weights = logits.softmax(dim=-1) if in_graph else torch.softmax(logits, dim=-1, out=logits)
        rows = weights.flatten(1, 2)
        if here is None:
            received[images] += rows.sum(dim=1)
        else:  # where keys have sizes, queries are the same tokens
            received[images] += ((here > 0).float().repeat(1, weights.shape[1]).unsqueeze(1) @ rows).squeeze(1)
        if v is not None:
            attended[images, heads] = weights @ v[images, heads]
    return attended, received


def _pieces(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Return slices of images and heads whose weights in float32 fit into the cache."""
    batch, n_heads = int(q.shape[0]), int(q.shape[1])
    at_once = max(1, (_CACHE if q.device.type == "cpu" else _MEMORY) // (4 * q.shape[2] * k.shape[2]))
    images, heads = max(1, at_once // n_heads), min(at_once, n_heads)
    return [
        (slice(image, image + images), slice(head, head + heads))
        for image in range(0, batch, images)
        for head in range(0, n_heads, heads)
    ]


def policy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return DynamicViT's attention in training: tokens with policy 0 (B, T) are masked for all queries but their own.

        e_ij = exp(a_ij - max_j a_ij) * (policy_j, or 1 where i = j)
        out_i = sum_j (e_ij + eps / T) / (sum_j e_ij + eps) v_j

    In float32 with all weights written out, so that gradients reach the policy. (B, H, T, d) each.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n_tokens, eps = q.shape[2], 1e-6
    with torch.autocast(q.device.type, enabled=False):
        logits = (q.float() @ k.float().transpose(-2, -1)) * scale
        logits = logits if bias is None else logits + bias.float()
        itself = torch.eye(n_tokens, k.shape[2], device=q.device)
        seen = policy.float()[:, None, None, :]
        exponentials = (logits - logits.amax(dim=-1, keepdim=True)).exp() * (seen * (1 - itself) + itself)
        weights = (exponentials + eps / n_tokens) / (exponentials.sum(dim=-1, keepdim=True) + eps)
        return (weights @ v.float()).to(v.dtype)
