"""Proof by running: a block taken apart must give what the library's block gives.

A copy of the block, in float32 and with fresh random weights (a branch that starts at zero would prove nothing), is run
whole and in parts, in evaluation and in training mode, once per class and configuration. Blocks whose weights cannot be
replaced (quantised ones, or those on the meta device) are not proved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Parts, attend
from agglo.hosts.common.swap import UnsupportedModelError

# How a block comes apart, an input (B, T, C), and what else its attention depends on.
ProbeCase = tuple[Parts, Tensor, AttentionInputs]

_LIMIT = 1e-4  # of the largest change that the block makes
_ATTENTION_DROPOUTS = ("attention_dropout", "dropout_prob", "attn_drop", "dropout", "attn_dropout")
_proved: set[Hashable] = set()


def prove(blocks: Iterable[nn.Module], where: str, cases: Callable[[Any], Iterable[ProbeCase]]) -> None:
    """Raise UnsupportedModelError if a block of the model `where` gives something else in parts.

    `cases` makes small random inputs for the copy of a block.
    """
    for block in blocks:
        names = tuple((name, type(module)) for name, module in block.named_modules())
        kind = names, tuple((name, tuple(value.shape)) for name, value in block.named_parameters())
        if kind in _proved:
            continue
        twin = _random_copy(block)
        if twin is not None:
            _require_equal(twin, f"{type(block).__name__} of {where}", cases)
        _proved.add(kind)


def plain_case(block: Any, parts: Parts) -> Iterator[ProbeCase]:
    """Yield a small random input for the copy of a block whose attention depends only on its tokens."""
    weight = next(parameter for parameter in block.parameters() if parameter.dim() == 1)
    yield parts, random_input((2, 7, weight.shape[-1]), weight), AttentionInputs()


def random_input(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the same random numbers each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(like.device)


def _random_copy(block: nn.Module) -> nn.Module | None:
    """Return a copy in float32 with random weights, without attention dropout; None if they cannot be replaced."""
    parameters = list(block.parameters())
    if not all(type(p.data) is Tensor and p.is_floating_point() and not p.is_meta for p in parameters):
        return None
    twin = copy.deepcopy(block).float().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(fresh / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5 + 0.5 * fresh)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        _stop_attention_dropout(module)
        if isinstance(module, nn.Dropout):
            module.forward = partial(_drop, module)  # type: ignore[method-assign]
    return twin


def _drop(dropout: nn.Dropout, x: Tensor) -> Tensor:
    """Drop the same elements of x whatever its layout in memory, by which torch draws."""
    return x * F.dropout(torch.ones(x.shape, device=x.device), dropout.p, dropout.training)


def _stop_attention_dropout(module: Any) -> None:
    """Stop the dropout of attention weights, which kernels draw in different orders."""
    attends = any(hasattr(module, name) for name in ("qkv", "q_proj", "query", "in_proj_weight"))
    for name in _ATTENTION_DROPOUTS:
        value = getattr(module, name, None)
        if isinstance(value, float):
            setattr(module, name, 0.0)
        elif attends and isinstance(value, nn.Dropout):
            value.p = 0.0
    if hasattr(getattr(module, "config", None), "attention_probs_dropout_prob"):  # the copy's own configuration
        module.config.attention_probs_dropout_prob = 0.0


def _require_equal(block: nn.Module, what: str, cases: Callable[[Any], Iterable[ProbeCase]]) -> None:
    try:
        off = max(_difference(block, *case) for case in cases(block))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{what} is built like layers that agglo knows, but it could not be run to make sure of that "
            f"({type(error).__name__}: {error}); see docs/hosts.md for how to write a host"
        ) from error
    if not off <= _LIMIT:
        raise UnsupportedModelError(
            f"{what} is built like layers that agglo knows, but taken apart it gives another result than its own "
            f"forward: off by {off:.2g} of what the layer changes (at most {_LIMIT:g} is rounding). It does something "
            "that agglo does not know of; see docs/hosts.md for how to write a host"
        )


@torch.no_grad()
def _difference(block: Any, parts: Parts, x: Tensor, inputs: AttentionInputs) -> float:
    """Return the largest difference between a block in parts and whole, as a fraction of what it changes in x."""
    worst = 0.0
    for training in (False, True):
        block.train(training)
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.autocast(x.device.type, enabled=False):
            torch.manual_seed(0)
            whole = parts.whole(block, x, inputs.rotary)
            torch.manual_seed(0)
            apart = parts.feed(block, attend(parts, block, x, inputs)[0])
        worst = max(worst, float((apart - whole).abs().max() / (whole - x).abs().max().clamp(min=1e-6)))
    return worst
