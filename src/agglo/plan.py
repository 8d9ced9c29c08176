"""What `apply` settles for a model: when to reduce, to how many tokens, and how attention treats the merged ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from agglo.methods import Grid, Method
from agglo.methods.base import Place
from agglo.schedule import Schedule, default_blocks


@dataclass(frozen=True)
class Plan:
    """How a model with a method applied runs.

    Attributes:
        schedule: Counts after each block; None where a threshold decides.
        threshold: Cosine distance up to which groups merge at `blocks`; None where a schedule decides.
        blocks: Where the threshold acts; None means a quarter, a half and three quarters of the depth.
        proportional: Whether log(size) is added to the attention logits.
        grid: (rows, columns) of the patches at the model's own input size, for hosts whose loop sees tokens alone.
        place: Where the method acts.
        reads: How many tokens in front the last block computes, since the model's head reads no others; None means all.
        merged: Whether merged tokens leave the model, one per group, instead of one for every position.
        read_blocks: With `merged`, the blocks whose states the surrounding model reads, if several, concatenated.
        ends: Tokens in front and at the end that are never merged, for hosts whose loop sees tokens alone.
    """

    schedule: Schedule | None
    threshold: float | None = None
    blocks: tuple[int, ...] | None = None
    proportional: bool = True
    grid: Grid | None = None
    place: Place = "after_attention"
    reads: int | None = None
    merged: bool = False
    read_blocks: tuple[int, ...] = ()
    ends: tuple[int, int] = (0, 0)

    def front(self, method: Method, last_target: int | None, traced: bool = False) -> int | None:
        """Return for how many tokens in front alone the last block may run; None where it runs for all.

        What a method decides between the last attention and the last MLP concerns tokens that are not read, so it is
        not called, except for a trace, or if it learns, since it may have a loss.

        Args:
            last_target: Tokens that are to be left at the last block; None where the method is not called there.
        """
        decides = last_target is not None and self.place == "after_attention"
        return None if decides and (traced or isinstance(method, nn.Module)) else self.reads

    def targets(
        self, method: Method, n_tokens: int, depth: int, grid: Grid | None = None, *, strict: bool = False
    ) -> list[int | None]:
        """Return what the method is to leave at each block: a count it really reaches, or None where it is not called.

        With a threshold the blocks where it acts have target 0, since no count is known.

        Args:
            strict: True raises ValueError where the schedule or the method cannot have what is asked for: `apply` does
                so, for the model's own image size. False takes the nearest possible count.
        """
        if self.schedule is None:
            blocks = default_blocks(depth) if self.blocks is None else self.blocks
            if any(block not in range(depth) for block in blocks):
                raise ValueError(f"blocks={blocks} do not fit a model of depth {depth}: 0 to {depth - 1} exist")
            return [0 if block in blocks else None for block in range(depth)]
        asked = self.schedule.counts(n_tokens, depth, strict=strict)
        reducing = _reducing(self.schedule, method, n_tokens, asked)
        wanted, left = [], n_tokens
        for block in reducing:
            wanted.append(asked[block] if strict else max(asked[block], method.least(left)))
            left = wanted[-1] if strict else method.reachable(left, wanted[-1])
        targets: list[int | None] = [None] * depth
        for block, count in zip(reducing, method.stages(n_tokens, wanted, grid), strict=True):
            targets[block] = count
        return targets

    def counts(self, method: Method, n_tokens: int, depth: int, grid: Grid | None = None) -> list[int]:
        """Return the patch tokens really left after each block, or processed by it where they return.

        With a threshold as many as there were, since it is not known.
        """
        counts, left = [], n_tokens
        for target in self.targets(method, n_tokens, depth, grid):
            left = target or (n_tokens if method.tokens_return == "after_block" else left)
            counts.append(left)
        return counts


def _reducing(schedule: Schedule, method: Method, n_tokens: int, asked: list[int]) -> list[int]:
    """Return the blocks at which the method is called, given the counts asked for after each block."""
    before = [n_tokens, *asked]
    if method.tokens_return == "after_block":
        return [block for block, count in enumerate(asked) if count < n_tokens]
    if method.tokens_return == "after_stage":
        # A stage of all tokens after one of fewer is where they return.
        return [b for b in schedule.starts(n_tokens, len(asked)) if min(asked[b], before[b]) < n_tokens]
    # Compared with what was asked before, not with what was reached: a rounding is not made up for later, at a block
    # that was to stay untouched.
    return [block for block, count in enumerate(asked) if count < before[block]]
