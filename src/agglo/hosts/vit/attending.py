"""One block, taken apart by its host's `Parts`: up to its MLP, or whole for the tokens in front alone."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.attention import attention_received, attention_with_received, policy_attention, proportional_attention
from agglo.hosts.vit.base import Parts, Projected


def attend(
    parts: Parts,
    block: nn.Module,
    x: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    sizes: Tensor | None,
    policy: Tensor | None,
    receives: bool,
) -> tuple[Tensor, Projected, Tensor | None]:
    """A block up to its MLP, what its attention worked on, and, if asked for, what attention each token received.

    bias: of the relative positions, beside any that the block's own `project` gives.
    """
    projected, received = with_bias(parts.project(block, x, table), bias), None
    q, k, v, scale, dropout = projected.q, projected.k, projected.v, projected.scale, projected.dropout
    bias, policy = projected.bias, of_keys(policy, k)
    sizes = of_keys(sizes, k)
    own = parts.attend(block, projected, sizes)
    if own is not None:
        attended = own
        received = attention_received(q, k, sizes, scale=scale, bias=bias) if receives else None
    elif policy is not None:
        attended = policy_attention(q, k, v, policy, scale=scale, bias=bias)
        received = attention_received(q, k, sizes, scale=scale, bias=bias) if receives else None
    elif receives:
        attended, received = attention_with_received(q, k, v, sizes, scale=scale, dropout=dropout, bias=bias)
    else:
        attended = proportional_attention(q, k, v, sizes, scale=scale, dropout=dropout, bias=bias)
    received = None if received is None else received[:, : x.shape[1]]
    return parts.join(block, x, attended, projected), projected, received


def of_keys(numbers: Tensor | None, k: Tensor) -> Tensor | None:
    """Numbers (B, T) of the tokens, with 1 for keys (B, H, T + n, d) that are no tokens: see `Projected`."""
    extra = 0 if numbers is None else k.shape[2] - numbers.shape[1]
    return numbers if numbers is None or extra == 0 else F.pad(numbers, (0, extra), value=1.0)


def with_bias(projected: Projected, bias: Tensor | None) -> Projected:
    """The same with one more bias on the attention logits."""
    if bias is None:
        return projected
    return replace(projected, bias=bias if projected.bias is None else projected.bias + bias)


def run_front(
    parts: Parts,
    block: nn.Module,
    x: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    sizes: Tensor | None,
    n_front: int,
) -> Tensor:
    """A block for the first n_front tokens alone, which attend to all of x (B, T, C): (B, n_front, C)."""
    projected = parts.project_front(block, x, table, n_front)
    projected = with_bias(projected, None if bias is None else bias[:, :, :n_front])
    attended = proportional_attention(
        projected.q,
        projected.k,
        projected.v,
        of_keys(sizes, projected.k),
        scale=projected.scale,
        dropout=projected.dropout,
        bias=projected.bias,
    )
    return parts.feed(block, parts.join(block, x[:, :n_front], attended, projected))
