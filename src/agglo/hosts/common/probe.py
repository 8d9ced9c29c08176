"""Proof by running: a block taken apart must give what the library's block gives.

A copy of the block, in float32 and with random weights (fresh ones: a branch that starts at zero would prove nothing),
is run whole and in parts, as it evaluates, and as it trains with the same random numbers for dropout. Once per class
and configuration; blocks whose weights cannot be replaced (quantised ones, or not there yet) are not proved.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Parts, attend
from agglo.hosts.common.swap import UnsupportedModelError

_LIMIT = 1e-4  # of the largest change that the block makes
_ATTENTION_DROPOUTS = ("attention_dropout", "dropout_prob", "attn_drop", "dropout", "attn_dropout")
_proved: set[Hashable] = set()


def kind_of(block: nn.Module) -> Hashable:
    """What blocks must have in common for the proof of one to hold for the other."""
    parts = tuple((name, type(module)) for name, module in block.named_modules())
    return parts, tuple((name, tuple(value.shape)) for name, value in block.named_parameters())


def is_proved(kind: Hashable) -> bool:
    """Whether a block of this kind was proved before."""
    return kind in _proved


def remember(kind: Hashable) -> None:
    """Prove no more blocks of this kind."""
    _proved.add(kind)


def random_copy(block: nn.Module) -> nn.Module | None:
    """A copy in float32 with random weights, without attention dropout; None if its weights cannot be replaced."""
    plain = all(
        type(value.data) is Tensor and value.is_floating_point() and not value.is_meta for value in block.parameters()
    )
    if not plain:
        return None
    twin = copy.deepcopy(block).float().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        fresh = fresh / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5 + 0.5 * fresh
        parameter.copy_(fresh)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        for name in _ATTENTION_DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return twin


@torch.no_grad()
def difference(block: Any, parts: Parts, x: Tensor, table: Tensor | None, bias: Tensor | None = None) -> float:
    """How far a block in parts is off the library's, as a fraction of the largest change it makes to x."""

    def apart() -> Tensor:
        joined, _, _ = attend(parts, block, x, AttentionInputs(rotary=table, bias=bias))
        return parts.feed(block, joined)

    worst = 0.0
    for training in (False, True):
        block.train(training)
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.autocast(x.device.type, enabled=False):
            torch.manual_seed(0)
            whole = parts.whole(block, x, table)
            torch.manual_seed(0)
            off = (apart() - whole).abs().max() / (whole - x).abs().max().clamp(min=1e-6)
        worst = max(worst, float(off))
    return worst


def unproved(block: nn.Module, where: str, error: Exception) -> UnsupportedModelError:
    """What to raise where a block could not be run."""
    return UnsupportedModelError(
        f"{type(block).__name__} of {where} is built like layers that agglo knows, but it could not be run to make "
        f"sure of that ({type(error).__name__}: {error}); see docs/hosts.md for how to write a host"
    )


def require_close(off: float, block: nn.Module, where: str) -> None:
    """UnsupportedModelError if a block in parts is too far off."""
    if not off <= _LIMIT:
        raise UnsupportedModelError(
            f"{type(block).__name__} of {where} is built like layers that agglo knows, but taken apart it gives "
            f"another result than its own forward: off by {off:.2g} of what the layer changes (at most {_LIMIT:g} is "
            "rounding). It does something that agglo does not know of; see docs/hosts.md for how to write a host"
        )
