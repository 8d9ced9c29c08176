"""One block: taken apart by its host's `Parts`, or whole, and a large batch a few images at a time.

On a CPU, the MLP's hidden tensor falls out of the caches between two operations. In slices of a few megabytes a
DeiT-Tiny block at batch 64 ran 1.15 times as fast on two cores, a DeiT-Base block 1.04 times. The batch stays whole
where slices would be visible: with gradients, in training, in compiled and traced graphs, with forward hooks, and with
quantised layers, which may take their scales from the whole batch. `AGGLO_SLICES=0` in the environment keeps every
batch whole.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import checkpoint

from agglo.attention import (
    LogSizes,
    attention_received,
    attention_with_received,
    policy_attention,
    proportional_attention,
)

Call = Callable[..., Any]
_HIDDEN_BYTES = 8 * 2**20
_HIDDEN_PER_CHANNEL = 4  # how much wider than its tokens an MLP usually is
_QUANTISERS = ("torch.ao.", "torchao.", "bitsandbytes.", "optimum.", "hqq.")


@dataclass(eq=False)  # not frozen, which would take three times as long to make
class Projected:
    """What a block's attention works on: q, k and v, (B, H, T, d) each."""

    q: Tensor
    k: Tensor  # behind the keys of the tokens there may be further ones, with values; features are then needed
    v: Tensor
    features: Tensor | None = None  # keys to compare tokens by where they are not k itself (before rotation, say)
    gate: Tensor | None = None  # what `join` multiplies its output by
    scale: float | None = None  # of the dot products; None means 1 / sqrt(d)
    dropout: float = 0.0  # of attention, 0 unless the block trains
    bias: Tensor | None = None  # (B or 1, H or 1, T, T), if it does not depend on positions: see `AttentionInputs`


class Parts(ABC):
    """How a block of a library comes apart. `rotary` is the block's table (..., T - prefix, 2d), or None."""

    treats_images_alike: bool = True  # whether a block may be given only some images of a batch
    needs_all_tokens: bool = False  # whether `whole` calls the block with something that fits only the original tokens

    @abstractmethod
    def whole(self, block: nn.Module, x: Tensor, rotary: Tensor | None) -> Tensor:
        """Run the block as the library does: x (B, T, C) -> (B, T, C)."""

    @abstractmethod
    def project(self, block: nn.Module, x: Tensor, rotary: Tensor | None, n_front: int | None = None) -> Projected:
        """Return q, k and v of x (B, T, C), after the first norm; queries of the first n_front tokens are enough."""

    def attend(self, block: nn.Module, projected: Projected, sizes: Tensor | None) -> Tensor | None:
        """Return the output (B, H, T, d) of attention that is not a proportional softmax over sizes (B, T), or None."""
        return None

    @abstractmethod
    def join(self, block: nn.Module, x: Tensor, attended: Tensor, projected: Projected) -> Tensor:
        """Return x (B, T, C) plus the output projection of attended (B, H, T, d)."""

    @abstractmethod
    def feed(self, block: nn.Module, x: Tensor) -> Tensor:
        """Return x (B, T, C) plus the MLP branch."""


def directly(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and keep its activations."""
    return function(*arguments)


def checkpointed(function: Call, *arguments: Any) -> Any:
    """Call a part of a block and compute its activations again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False)


@dataclass(eq=False)
class AttentionInputs:
    """What the attention of a block depends on, apart from its tokens (B, T, C)."""

    rotary: Tensor | None = None  # the table of their positions, as `Parts.project` takes it
    bias: Tensor | None = None  # relative position bias (B or 1, H or 1, T, T)
    sizes: Tensor | None = None  # (B, T), for proportional attention
    log_sizes: LogSizes | None = None  # of the sizes, where it is known
    policy: Tensor | None = None  # (B, T), a mask of keys that learns
    # Keys and values (B, H, n, d) that belong to no token of x, and their bias (B, 1, 1, n).
    elsewhere: tuple[Tensor, Tensor, Tensor] | None = None
    bounds: Tensor | None = None  # where packed sequences that the block attends within begin and end


def attend(
    parts: Parts,
    block: nn.Module,
    x: Tensor,
    inputs: AttentionInputs,
    receives: bool = False,
    n_front: int | None = None,
) -> tuple[Tensor, Projected, Tensor | None]:
    """Run a block up to its MLP, or only the first n_front tokens, which attend to all of x (B, T, C).

    Returns:
        The tokens, what the attention worked on, and, if `receives`, the attention (B, T) that each token received.
    """
    projected = parts.project(block, x, inputs.rotary, n_front)
    if inputs.bias is not None:
        projected = replace(projected, bias=inputs.bias if projected.bias is None else projected.bias + inputs.bias)
    if n_front is not None:
        projected, x = _front(projected, n_front), x[:, :n_front]
    if inputs.elsewhere is not None:
        projected = _with_elsewhere(projected, *inputs.elsewhere)
    q, k, v, scale, bias = projected.q, projected.k, projected.v, projected.scale, projected.bias
    sizes, policy = of_keys(inputs.sizes, k), of_keys(inputs.policy, k)
    attended = parts.attend(block, projected, sizes)
    received = None
    if attended is None and policy is not None:
        attended = policy_attention(q, k, v, policy, scale=scale, bias=bias)
    elif attended is None and receives:
        attended, received = attention_with_received(q, k, v, sizes, scale=scale, dropout=projected.dropout, bias=bias)
    elif attended is None:
        log_sizes = inputs.log_sizes if sizes is inputs.sizes else None  # not of further keys
        attended = proportional_attention(
            q, k, v, sizes, scale=scale, dropout=projected.dropout, bias=bias, log_sizes=log_sizes
        )
    if receives:
        received = attention_received(q, k, sizes, scale=scale, bias=bias) if received is None else received
        received = received[:, : x.shape[1]]
    return parts.join(block, x, attended, projected), projected, received


def of_keys(numbers: Tensor | None, k: Tensor) -> Tensor | None:
    """Return numbers (B, T) of the tokens, with 1 for keys (B, H, T + n, d) that are no tokens: see `Projected`."""
    extra = 0 if numbers is None else k.shape[2] - numbers.shape[1]
    return numbers if numbers is None or extra == 0 else F.pad(numbers, (0, extra), value=1.0)


def _front(projected: Projected, n_front: int) -> Projected:
    """Return the projections with no other queries than those of the first tokens."""
    gate, bias = projected.gate, projected.bias
    return replace(
        projected,
        q=projected.q[:, :, :n_front],
        gate=None if gate is None else gate[:, :n_front],
        bias=None if bias is None else bias[:, :, :n_front],
    )


def _with_elsewhere(own: Projected, k: Tensor, v: Tensor, bias: Tensor) -> Projected:
    """Return the projections with keys and values of tokens elsewhere behind their own."""
    bias = torch.cat([bias.new_zeros(*bias.shape[:3], own.k.shape[2]), bias], dim=-1)
    return replace(
        own,
        k=torch.cat([own.k, k.to(own.k.dtype)], dim=2),
        v=torch.cat([own.v, v.to(own.v.dtype)], dim=2),
        features=own.k if own.features is None else own.features,
        bias=bias.expand(-1, -1, own.q.shape[2], -1),
    )


def in_slices(call: Call, alike: bool, function: Call, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """Return call(function, block, x, *rest), sliced if the function treats each image of x (B, T, C) alike."""
    images = _images_at_once(x) if alike else x.shape[0]
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
    """Return whether slices of the batch change nothing that anyone could see."""
    if all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks:
        return False
    if os.environ.get("AGGLO_SLICES") == "0":
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks or _is_quantised(module)
        for module in block.modules()
    )


def _is_quantised(module: nn.Module) -> bool:
    """Return whether the module comes from a library that quantises, or has weights of another tensor class."""
    if type(module).__module__.startswith(_QUANTISERS):
        return True
    tensors = [p for p in (*module._parameters.values(), *module._buffers.values()) if p is not None]
    return not all(type(p) in (Tensor, nn.Parameter) and type(p.data) in (Tensor, nn.Parameter) for p in tensors)
