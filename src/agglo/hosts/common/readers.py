"""Heads that read the class token alone: the last block need not compute what is not read.

The last block needs keys and values of all tokens, but queries, output projection, MLP and last norm of the class token
only (of the class and distillation tokens, where both are read). The output is the same but for rounding.

A loop over blocks cannot see who called it. Where head and loop are in one module, the host's override of `forward`
knows (timm). Where the head is in a module around the loop's, that module, the reader, gets another class too. Its
`forward` is the library's own, run with a stand-in for `self` whose loop gives the tokens in front alone. Whoever calls
the loop's module by another way gets all tokens.

The last block runs for all tokens as well where somebody would notice: with forward or backward hooks on the loop, on
the last block, on any module in it or on the last norm, and where the loop was compiled by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from agglo.hosts.common.swap import ReducedModule, Setting, StandIn, begins_pass, original_class, setup_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN_TENSORS = (Tensor, nn.Parameter)
# transformers leaves these on layers once hidden states were asked for; outside of such a call they collect nothing.
_SILENT_HOOKS = ("transformers.utils.output_capturing", "transformers.utils.generic")


@dataclass(frozen=True)
class Head:
    """The reader of tokens after the last block, which reads no others than the first ones.

    Args:
        reads: How many.
        reader: The module whose `forward` calls the loop and reads; None where that is the loop's own override, which
            says so by `replace(setup, front_only=True)`.
        loop: The name of the loop's module in the reader.
        watched: Names of the reader's submodules that see what comes out of the last block.
        settings: Attributes of the reader, by name, and the values with which it reads like that.
    """

    reads: int
    reader: nn.Module | None = None
    loop: str = ""
    watched: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Reading(Setting):
    """What `agglo.apply` put into a reader: its head, and the mixin of its loop."""

    loop: str
    watched: tuple[str, ...]
    settings: tuple[tuple[str, object], ...]
    mixin: type[ReducedModule]

    def holds(self, reader: Any, loop: nn.Module) -> bool:
        """Return whether nothing has come in between since `agglo.apply`."""
        same = all(getattr(reader, name) == value for name, value in self.settings)
        return same and not is_replaced(loop) and not are_watched([loop, *map(reader.get_submodule, self.watched)])


class ReducedReader(ReducedModule):
    """The override of a reader's `forward`."""

    @begins_pass
    def forward(self: Any, reading: Reading, *args: Any, **kwargs: Any) -> Any:
        reader, loop = self, getattr(self, reading.loop)
        setup = setup_of(loop)
        if setup is not None and setup.plan.reads is not None and reading.holds(self, loop):
            # The override itself, not the loop's method: that one would ask anew what is applied.
            override = reading.mixin.forward.__wrapped__  # type: ignore[attr-defined]
            reader = StandIn(self, **{reading.loop: partial(override, loop, replace(setup, front_only=True))})
        return original_class(self).forward(reader, *args, **kwargs)


def are_watched(modules: Iterable[nn.Module]) -> bool:
    """Return whether a hook on one of the modules would notice that tokens are missing.

    Hooks on all modules at once do not count: they are those of profilers and FLOP counters.
    """
    hooks = (hook for module in modules for name in _HOOKS for hook in getattr(module, name).values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_SILENT_HOOKS) for hook in hooks)


def is_replaced(module: nn.Module) -> bool:
    """Return whether a call of the module ends elsewhere than in its class's `forward`."""
    return module._compiled_call_impl is not None or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether rows of the module's weight can be used apart: no adapter, quantisation or hook is in between."""
    if type(module) is not nn.Linear or is_replaced(module) or are_watched([module]):
        return False
    return type(module.weight) in _PLAIN_TENSORS and type(module.weight.data) in _PLAIN_TENSORS
