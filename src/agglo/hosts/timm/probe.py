"""A small random input for a block of timm; then the proof (`probe.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from agglo.hosts.common import probe
from agglo.hosts.timm.parts import parts_of

_TOKENS = 7


def prove_blocks(blocks: Iterable[Any], where: str) -> None:
    """UnsupportedModelError if a block of some kind is not what its names say."""
    for block in blocks:
        kind = probe.kind_of(block)
        if probe.is_proved(kind):
            continue
        twin: Any = probe.random_copy(block)
        if twin is not None:
            for attn in [twin.attn] if hasattr(twin, "attn") else [one.attn for one in twin.attns]:
                attn.attn_drop.p = 0.0  # kernels draw it in ways of their own
            _prove(block, twin, where)
        probe.remember(kind)


def _prove(block: Any, twin: Any, where: str) -> None:
    norm = twin.norm1 if hasattr(twin, "norm1") else twin.attns[0].norm
    n_tokens, table = _TOKENS, None
    attn: Any = getattr(twin, "attn", None)
    if getattr(attn, "relative_position_bias_table", None) is not None:
        n_tokens = attn.window_size[0] * attn.window_size[1] + 1
        table = attn._get_rel_pos_bias()
    x = torch.randn(2, n_tokens, norm.weight.shape[-1], generator=torch.Generator().manual_seed(1))
    x = x.to(norm.weight.device)
    try:
        off = probe.difference(twin, parts_of(twin), x, None, table)
        if hasattr(attn, "num_prefix_tokens"):  # one that rotates, if it is given a table
            rotary = torch.randn(n_tokens - attn.num_prefix_tokens, 2 * attn.head_dim, device=x.device)
            off = max(off, probe.difference(twin, parts_of(twin), x, rotary, table))
    except Exception as error:
        raise probe.unproved(block, where, error) from error
    probe.require_close(off, block, where)


def is_like_a_block(block: nn.Module) -> bool:
    """Whether a block has the parts of a pre-norm block."""
    return all(hasattr(block, name) for name in ("norm1", "attn", "norm2", "mlp")) and hasattr(block.attn, "qkv")
