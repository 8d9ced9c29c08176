"""The loop over blocks, as its library wrote it, with blocks that run on fewer and fewer tokens.

The method that holds the loop runs as it is, with a stand-in for `self` that has other blocks. Each takes what the
library hands the block, and gives back what the block would: all tokens, in the original number and order. So whatever
a model does around its loop, or between two blocks, stays the library's: what it adds to the tokens there is found by
comparison with what the block before gave, and merged tokens gain the mean of it.

Where nothing but the next block sees what a block gives, the loop is lazy: tokens are put back once, at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from agglo.hosts.common.blocks import AttentionInputs, Parts, checkpointed, directly
from agglo.hosts.common.forward_pass import NO_INPUTS, ForwardPass
from agglo.hosts.common.layers import Structure
from agglo.hosts.common.positions import Positions
from agglo.hosts.common.sequences import Split
from agglo.hosts.common.swap import PassSetup, StandIn
from agglo.methods import Grid
from agglo.methods.base import square

Given = Mapping[str, Any]


class BlockLoop(ABC):
    """The blocks of one forward pass. A host says what its library hands them, and how they come apart.

    Args:
        owner: The module that loops over the blocks.
        setup: What is applied, as the pass found it at its beginning.
        lazy: Whether nothing but the next block sees what a block gives.
        restores: Whether the last block gives back all tokens, or those that are left, prefix tokens first.
    """

    blocks_name = "blocks"
    instead: Given = MappingProxyType({})  # other attributes that the stand-in for the owner has

    def __init__(self, owner: Any, setup: PassSetup, *, lazy: bool = False, restores: bool = True) -> None:
        self.owner, self.setup, self.lazy, self.restores = owner, setup, lazy, restores
        self.blocks = list(getattr(owner, self.blocks_name))
        self.run: ForwardPass | Split | None = None
        self.given_back: Tensor | None = None
        self._structures: dict[type, Structure] = {}

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the owner as its library wrote it, with the blocks of this pass."""
        original = getattr(type(self.owner), "agglo_original", type(self.owner))  # the class may be swapped back by now
        out = getattr(original, method)(self.stand_in(), *args, **kwargs)
        for run in [] if self.run is None else self.run.passes():
            run.record()
        return out

    def stand_in(self) -> StandIn:
        """Return what the method is given as self."""
        return StandIn(self.owner, **self.replaced())

    def replaced(self) -> dict[str, Any]:
        """Return the attributes that the stand-in has in place of the owner's."""
        steps = _Blocks(_Block(self, index, block) for index, block in enumerate(self.blocks))
        return {self.blocks_name: steps, **self.instead}

    @abstractmethod
    def parts(self, block: nn.Module, given: Given) -> Parts:
        """Return how a block comes apart, given the arguments that the library adds to the tokens."""

    def structure(self, block: Any) -> Structure:
        """Return the structure of a block, which is looked for once per pass and class."""
        if type(block) not in self._structures:
            self._structures[type(block)] = Structure.of(block)
        return self._structures[type(block)]

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
        self.advance(index, block, x, given)
        last = index == len(self.blocks) - 1
        self.given_back = x if self.lazy and not last else self.leaving(last)
        return self.given_back

    def leaving(self, last: bool) -> Tensor:
        """Return the tokens that a block gives back."""
        assert self.run is not None
        if last and not self.restores and isinstance(self.run, ForwardPass):
            return self.run.x
        return self.run.full()

    def advance(self, index: int, block: nn.Module, x: Tensor, given: Given) -> None:
        """Run one block on the tokens that are left."""
        if self.run is None:
            self.run = self.begin(block, x, given)
        elif x is not self.given_back:
            self._changed(x)
        self.run.block(index, block, self.parts(block, given), self.inputs(block, x, given))

    def _changed(self, x: Tensor) -> None:
        """Take over what the library did to the tokens since the block before."""
        if self.lazy:
            raise RuntimeError(f"{type(self.owner).__name__} changes tokens between blocks, against its source")
        assert self.given_back is not None
        assert self.run is not None
        more = int(x.shape[-2]) - int(self.given_back.shape[-2])
        if more and (more < 0 or isinstance(self.run, Split)):
            raise ValueError(f"between two blocks {-more} tokens went, which does not go with token reduction")
        self.run.add(x[:, more:] - self.given_back if more else x - self.given_back)
        if more:
            assert isinstance(self.run, ForwardPass)
            self.run.prepend(x[:, :more])


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
