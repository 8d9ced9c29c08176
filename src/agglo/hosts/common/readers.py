"""Heads that read the class token alone: the last block need not compute what is not read.

The last block needs keys and values of all tokens, but queries, output projection, MLP and last norm of the class token
only (of the class and distillation tokens, where both are read). The output is the same but for rounding.

Where head and loop are in one module (timm), the host's override of `forward` knows what is read. Where the head is in
a module around the loop's, that module, the reader, gets another class too: its `forward` runs with a stand-in for
`self` whose loop gives the tokens in front alone. All other callers of the loop's module get all tokens.

The last block runs for all tokens where the difference would show: with hooks on the loop, on the last block, on a
module in it or on the last norm, and where the loop was compiled by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from agglo.hosts.common.swap import (
    ReducedModule,
    Setting,
    StandIn,
    are_watched,
    begins_pass,
    original_class,
    setup_of,
)

_PLAIN_TENSORS = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Head:
    """The reader of tokens after the last block, which reads only the first ones.

    Args:
        reads: How many.
        reader: The module whose `forward` calls the loop and reads; None where the loop's own override does that.
        loop: The name of the loop's module in the reader.
        watched: Names of the reader's submodules that see what comes out of the last block.
        settings: Attributes of the reader, by name, and the values with which it reads only these tokens.
    """

    reads: int
    reader: nn.Module | None = None
    loop: str = ""
    watched: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Reading(Setting):
    """What `agglo.apply` put into a reader: its head, and the mixin of its loop."""

    head: Head
    mixin: type[ReducedModule]

    def holds(self, reader: Any, loop: nn.Module) -> bool:
        """Return whether nothing has come in between since `agglo.apply`."""
        same = all(getattr(reader, name) == value for name, value in self.head.settings)
        return same and not is_replaced(loop) and not are_watched([loop, *map(reader.get_submodule, self.head.watched)])


class ReducedReader(ReducedModule):
    """The override of a reader's `forward`."""

    @begins_pass
    def forward(self: Any, reading: Reading, *args: Any, **kwargs: Any) -> Any:
        reader, loop = self, getattr(self, reading.head.loop)
        setup = setup_of(loop)
        if setup is not None and setup.plan.reads is not None and reading.holds(self, loop):
            # The override itself, not the loop's method: that one would ask anew what is applied.
            override = reading.mixin.forward.__wrapped__  # type: ignore[attr-defined]
            reader = StandIn(self, **{reading.head.loop: partial(override, loop, replace(setup, front_only=True))})
        return original_class(self).forward(reader, *args, **kwargs)


def is_replaced(module: nn.Module) -> bool:
    """Return whether a call of the module ends elsewhere than in its class's `forward`."""
    return module._compiled_call_impl is not None or "forward" in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether rows of the module's weight can be used apart: no adapter, quantisation or hook is in between."""
    if type(module) is not nn.Linear or is_replaced(module) or are_watched([module]):
        return False
    return type(module.weight) in _PLAIN_TENSORS and type(module.weight.data) in _PLAIN_TENSORS
