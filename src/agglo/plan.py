"""What `apply` settled on: when to reduce, to how many tokens, and how attention treats the merged ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from agglo.methods import Grid, Method
from agglo.methods.base import PLACES, Place
from agglo.schedule import Schedule, default_blocks


@dataclass(frozen=True)
class Plan:
    """schedule: counts after each block; None where a threshold decides.
    threshold: cosine distance up to which groups merge at the threshold's blocks; None where a schedule decides.
    blocks: where the threshold acts; None means a quarter, a half and three quarters of the depth.
    proportional: whether log(size) is added to the attention logits.
    grid: (rows, columns) of the patches at the model's own input size, for hosts whose loop sees tokens alone.
    acts: where the method acts; None means at its own place.
    ends: tokens in front and at the end that are never merged, for the same hosts.
    reads: how many tokens in front the model's head reads, where those that nobody reads are dropped; None keeps all.
    merged: whether tokens leave as merged as they are, one per group, and not one for every position.
    read_blocks: where they do, the blocks whose states the model around reads; if several, side by side.
    """

    schedule: Schedule | None
    threshold: float | None = None
    blocks: tuple[int, ...] | None = None
    proportional: bool = True
    grid: Grid | None = None
    acts: Place | None = None
    reads: int | None = None
    merged: bool = False
    read_blocks: tuple[int, ...] = ()
    ends: tuple[int, int] = (0, 0)

    def acts_before_block(self, method: Method) -> bool:
        """Whether the method acts before a block, or else between its attention and its MLP."""
        return (self.acts or method.acts) == "before block"

    def front(self, method: Method, last_target: int | None, traced: bool = False) -> int | None:
        """How many tokens in front the last block, at which `last_target` are to be left, may run for alone; None where
        it runs for all.

        What a method decides between the last attention and the last MLP is about tokens that are not read then, and
        it need not be asked. It is where somebody traces, or where it learns, since it may have a loss.
        """
        decides = last_target is not None and not self.acts_before_block(method)
        return None if decides and (traced or isinstance(method, nn.Module)) else self.reads

    def targets(self, method: Method, n_tokens: int, depth: int, grid: Grid | None = None) -> list[int | None]:
        """What the method is to leave at each block: a count it really reaches, or None where it is not asked.

        With a threshold the blocks where it acts have target 0, since no count is known.
        """
        if self.schedule is None:
            blocks = default_blocks(depth) if self.blocks is None else self.blocks
            if any(block not in range(depth) for block in blocks):
                raise ValueError(f"blocks={blocks} do not fit a model of depth {depth}: 0 to {depth - 1} exist")
            return [0 if block in blocks else None for block in range(depth)]
        asked = self.schedule.counts(n_tokens, depth)
        reducing = self._reducing(method, n_tokens, asked)
        targets: list[int | None] = [None] * depth
        reached = method.stages(n_tokens, [asked[block] for block in reducing], grid)
        for block, count in zip(reducing, reached, strict=True):
            targets[block] = count
        return targets

    def _reducing(self, method: Method, n_tokens: int, asked: list[int]) -> list[int]:
        """Blocks at which the method is asked, given the counts asked for after each block."""
        assert self.schedule is not None
        before = [n_tokens, *asked]
        if method.tokens_return == "after block":
            return [block for block, count in enumerate(asked) if count < n_tokens]
        if method.tokens_return == "after stage":
            starts = self.schedule.starts(n_tokens, len(asked))
            # A stage of all tokens after one of fewer is where they return.
            return [block for block in starts if min(asked[block], before[block]) < n_tokens]
        # Compared with what was asked before, not with what was reached: a rounding is not made up for later, at a
        # block that was to stay untouched.
        return [block for block, count in enumerate(asked) if count < before[block]]

    def counts(self, method: Method, n_tokens: int, depth: int, grid: Grid | None = None) -> list[int]:
        """Patch tokens really left after each block, or processed by it where they return; with a threshold as many
        as there were, since it is not known."""
        counts, left = [], n_tokens
        for target in self.targets(method, n_tokens, depth, grid):
            left = target or (n_tokens if method.tokens_return == "after block" else left)
            counts.append(left)
        return counts


def require_place(method: Method, acts: Place | None) -> None:
    """ValueError unless the method can act there."""
    if acts is None or acts == method.acts:
        return
    if acts not in PLACES:
        raise ValueError(f"acts={acts!r} is not known; accepted: {', '.join(map(repr, PLACES))}")
    if acts != "before block" or not method.may_act_before:
        raise ValueError(f"method {method.name!r} acts {method.acts!r} and cannot act {acts!r}")
    features = method.options().get("features", "tokens")
    if any(each != "tokens" for each in ([features] if isinstance(features, str) else features)):
        raise ValueError(
            f"features={features!r} do not exist before a block, whose keys and values are made in it; "
            "acts='before block' goes with features='tokens'"
        )
