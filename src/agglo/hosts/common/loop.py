"""The loop over blocks, as its library wrote it, with blocks that run on fewer and fewer tokens.

The method that holds the loop runs with a stand-in for `self` that has other blocks. Each gives back what the library's
block would: all tokens, in the original number and order. What a model adds to the tokens between two blocks is found
by comparison with what the block before gave, and merged tokens gain the mean of it. Where only the next block sees
what a block gives, the loop is lazy: tokens are put back once, at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Parts, checkpointed, directly
from agglo.hosts.common.forward_pass import NO_INPUTS, ForwardPass
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.sequences import Split
from agglo.hosts.common.swap import PassSetup, StandIn, original_class
from agglo.methods import Grid
from agglo.methods.base import square

Given = Mapping[str, Any]
T = TypeVar("T")


class BlockLoop(ABC):
    """The blocks of one forward pass of their owner. A host says what its library hands them, and how they come apart.

    Args:
        owner: The module that loops over the blocks.
        setup: The settings of this pass.
        lazy: Whether only the next block sees what a block gives.
        restores: Whether the last block gives back all tokens, or those that are left, prefix tokens first.
    """

    blocks_name = "blocks"
    stand_in_class: type[StandIn] = StandIn
    instead: Given = MappingProxyType({})  # other attributes that the stand-in for the owner has

    def __init__(self, owner: Any, setup: PassSetup, *, lazy: bool = False, restores: bool = True) -> None:
        self.owner, self.setup, self.lazy, self.restores = owner, setup, lazy, restores
        self.blocks = list(getattr(owner, self.blocks_name))
        self.run: ForwardPass | Split | None = None
        self.given_back: Tensor | None = None
        # A graph that noticed a change outside of it would be compiled again.
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        self._known: dict[type, Any] = {} if in_graph else setup.known.blocks

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the owner as its library wrote it, with the blocks of this pass."""
        out = getattr(original_class(self.owner), method)(self.stand_in(), *args, **kwargs)
        if self.run is not None:
            self.run.record()
        return out

    def stand_in(self) -> StandIn:
        """Return what the method is given as self."""
        kind = getattr(type(self.owner), "agglo_stand_in", self.stand_in_class)
        steps = _Blocks(_Block(self, index, block) for index, block in enumerate(self.blocks))
        return kind(self.owner, **{self.blocks_name: steps, **self.instead})

    @abstractmethod
    def parts(self, block: nn.Module, given: Given) -> Parts:
        """Return how a block comes apart, given the arguments that the library adds to the tokens."""

    def known_of(self, block: Any, find: Callable[[Any], T]) -> T:
        """Return find(block), which says how blocks of a class come apart and is called once for each class."""
        if type(block) not in self._known:
            self._known[type(block)] = find(block)
        return cast(T, self._known[type(block)])

    def inputs(self, block: nn.Module, x: Tensor, given: Given) -> AttentionInputs:
        """Return the rotary table and the relative position bias of all tokens x (B, T, C)."""
        return NO_INPUTS

    def begin(self, block: nn.Module, x: Tensor, given: Given) -> ForwardPass | Split:
        """Begin the pass with the tokens and the arguments that the first block is called with."""
        return self.begin_pass(x)

    def begin_pass(self, x: Tensor, positions: Positions | None = None, prefix: int | None = None) -> ForwardPass:
        """Return a pass of tokens x (B, T, C)."""
        front, suffix = self.setup.plan.ends
        prefix = front if prefix is None else prefix
        return ForwardPass(
            self.setup,
            x,
            depth=len(self.blocks),
            prefix=prefix,
            suffix=suffix,
            training=self.owner.training,
            positions=positions,
            grid=self.grid(int(x.shape[1]) - prefix - suffix),
            call=checkpointed if self.is_checkpointing() else directly,
        )

    def grid(self, n_patches: int) -> Grid | None:
        """Return (rows, columns) of the patches: the model's own, or a square of another size."""
        own = self.setup.plan.grid
        if own is None:
            return None
        return own if own[0] * own[1] == n_patches else square(n_patches)

    def is_checkpointing(self) -> bool:
        """Return whether activations are computed again in the backward pass."""
        return bool(getattr(self.owner, "grad_checkpointing", False))

    def step(self, index: int, block: nn.Module, x: Tensor, **given: Any) -> Any:
        """Run one block on what it is handed, and return what the library's block would."""
        run = self.advance(index, block, x, given)
        if index < len(self.blocks) - 1:
            self.given_back = x if self.lazy else run.full()
        else:
            self.given_back = run.full() if self.restores or isinstance(run, Split) else run.x
        return self.given_back

    def advance(self, index: int, block: nn.Module, x: Tensor, given: Given) -> ForwardPass | Split:
        """Run one block on the tokens that are left, and return the pass."""
        if self.run is None:
            self.run = self.begin(block, x, given)
        elif x is not self.given_back:
            self._take_over(x, self.run)
        self.run.block(index, block, self.parts(block, given), self.inputs(block, x, given))
        return self.run

    def _take_over(self, x: Tensor, run: ForwardPass | Split) -> None:
        """Do to the tokens that are left what the library did to all tokens since the block before."""
        if self.lazy:
            raise RuntimeError(f"{type(self.owner).__name__} changes tokens between blocks, against its source")
        assert self.given_back is not None
        more = int(x.shape[-2]) - int(self.given_back.shape[-2])
        if not more:
            run.add(x - self.given_back)
        elif more < 0 or isinstance(run, Split):
            raise ValueError("the number of tokens changes between two blocks, which does not go with token reduction")
        else:
            run.add(x[:, more:] - self.given_back)
            run.prepend(x[:, :more])


class _Blocks(list[Any]):
    """The blocks of one pass: looped over, sliced, or called as a whole."""

    def __call__(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class _Block:
    """What the library finds in place of a block. Anything but a call goes to the block."""

    def __init__(self, loop: BlockLoop, index: int, block: nn.Module) -> None:
        self.loop, self.index, self.block = loop, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loop.step(self.index, self.block, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)
