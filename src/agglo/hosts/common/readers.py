"""Heads that read the class token alone: the last block need not compute what nobody reads.

The class token of the last block asks, and all tokens are asked: keys and values of all of them are needed, but
queries, output projection, MLP and last norm of the class token only (of the class and distillation tokens, where both
are read). The output is the same but for rounding.

A loop over blocks cannot see who called it. Where head and loop are in one module, the host's override of `forward`
knows (timm). Where the head is in a module around the loop's, that module, the reader, gets another class too. Its
`forward` is the library's own, run with a stand-in for `self` whose loop gives the tokens in front alone. Whoever calls
the loop's module by another way gets all tokens.

The last block runs for all tokens as well where somebody would notice: with forward or backward hooks on the loop, on
the last block, on any module in it or on the last norm, and where the loop was compiled by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.hosts.common.swap import Reading, ReducedModule, StandIn, setup_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN_TENSORS = (Tensor, nn.Parameter)
# transformers leaves these on layers once hidden states were asked for; outside of such a call they collect nothing.
_SILENT_HOOKS = ("transformers.utils.output_capturing", "transformers.utils.generic")


class ReducedReader(ReducedModule):
    """The override of a reader's `forward`, under the signature of the original."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "agglo_original" in vars(cls):  # not for classes that others make of this one
            cls.forward = _reading(cls.agglo_original.forward)  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In each reduced class another function, see above."""
        raise NotImplementedError


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        reading: Reading | None = getattr(self, "agglo_applied", None)
        if reading is None:  # removed after Python had looked up this function
            return original(self, *args, **kwargs)
        loop = getattr(self, reading.loop)
        setup = setup_of(loop)
        if setup is None or setup.plan.reads is None or not _reads_like_that(self, loop, reading):
            return original(self, *args, **kwargs)
        # The override itself, not the loop's method: that one would ask anew what is applied.
        override = reading.mixin.forward.__wrapped__  # type: ignore[attr-defined]
        short = partial(override, loop, replace(setup, front_only=True))
        return original(StandIn(self, **{reading.loop: short}), *args, **kwargs)

    return forward


def _reads_like_that(reader: Any, loop: nn.Module, reading: Reading) -> bool:
    """Whether nothing has come in between since `agglo.apply`."""
    same = all(getattr(reader, name) == value for name, value in reading.settings)
    return same and not is_replaced(loop) and not are_watched([loop, *map(reader.get_submodule, reading.watched)])


def are_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody hangs on one of the modules who would notice that tokens are missing.

    Hooks on all modules at once do not count: they are those of profilers and FLOP counters.
    """
    return any(_is_heard(hook) for module in modules for name in _HOOKS for hook in getattr(module, name).values())


def _is_heard(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_SILENT_HOOKS)


def is_replaced(module: nn.Module) -> bool:
    """Whether a call of the module ends elsewhere than in its class's `forward`."""
    return module._compiled_call_impl is not None or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Whether rows of the module's weight can be used apart: no adapter, quantisation or hook is in between."""
    if type(module) is not nn.Linear or is_replaced(module) or are_watched([module]):
        return False
    return type(module.weight) in _PLAIN_TENSORS and type(module.weight.data) in _PLAIN_TENSORS


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """X (B, T, C) through some rows of a linear layer."""
    return F.linear(x, weight[rows], None if bias is None else bias[rows])
