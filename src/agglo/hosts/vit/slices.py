"""A block's work on a large batch, a few images at a time, where that is faster and changes nothing.

On a CPU, torch takes every tensor over 32 MB fresh from the system, page by page, and smaller ones still fall out of
the caches between two operations. The MLP's hidden tensor is the largest of a block; sliced so that it takes a few
megabytes, a DeiT-Tiny block at batch 64 ran 1.15 times as fast on two cores, a DeiT-Base block 1.04 times.

The batch stays whole where slices would be noticed: with gradients, in training (dropout draws in another order, batch
norm sees other batches), in compiled and traced graphs, with forward hooks on the block's modules or on all modules,
and with quantised layers, which may take their scales from the whole batch. `AGGLO_SLICES=0` in the environment keeps
every batch whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

VARIABLE = "AGGLO_SLICES"
_HIDDEN_BYTES = 8 * 2**20
_HIDDEN_PER_CHANNEL = 4  # how much wider than its tokens an MLP usually is
_QUANTISERS = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "hqq.")
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def in_slices(
    call: Callable[..., Any], function: Callable[..., Any], block: nn.Module, x: Tensor, *rest: Any
) -> Tensor:
    """call(function, block, x, *rest) for a function that treats each image of x (B, T, C) alone."""
    images = _images_at_once(x)
    if images >= x.shape[0] or not _may_slice(block):
        whole: Tensor = call(function, block, x, *rest)
        return whole
    return torch.cat([call(function, block, piece, *rest) for piece in x.split(images)])


def _images_at_once(x: Tensor) -> int:
    batch, n_tokens, width = x.shape
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return batch
    return max(1, _HIDDEN_BYTES // (n_tokens * width * _HIDDEN_PER_CHANNEL * x.element_size()))


def _may_slice(block: nn.Module) -> bool:
    """Whether nobody would notice slices of the batch where they expect the batch."""
    if not _is_on() or all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks:
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks or _is_quantised(module)
        for module in block.modules()
    )


def _is_on() -> bool:
    setting = os.environ.get(VARIABLE, "1")
    if setting not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={setting!r} in the environment; accepted: '0' and '1'")
    return setting == "1"


def _is_quantised(module: nn.Module) -> bool:
    """Whether the module comes from a library that quantises, or has weights of a tensor class of their own."""
    if type(module).__module__.startswith(_QUANTISERS):
        return True
    return any(type(p) not in _PLAIN_TENSORS or type(p.data) not in _PLAIN_TENSORS for p in _own_tensors(module))


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [p for p in (*module._parameters.values(), *module._buffers.values()) if p is not None]
