"""From the tokens that are left back to one for every position."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from agglo.grouping import Grouping

BeforeDrops = list[tuple[Tensor, Grouping | None]]


@dataclass(frozen=True)
class Run:
    """What came out of the loop.

    reduced: tokens (B, G, C) after the last block run: all that a head needs that reads prefix tokens alone.
    grouping: of the first tokens, which led there, if any.
    kept: full-length tokens (B, T, C) after each block that was asked for, in order.
    before_drops: the tokens just before some of them were dropped, and the grouping that had led there.
    merged: whether the plan wants them to leave as they are, one per group.
    """

    reduced: Tensor
    grouping: Grouping | None
    kept: list[Tensor]
    before_drops: BeforeDrops = field(default_factory=list)
    merged: bool = False

    @property
    def tokens(self) -> Tensor:
        """What a last norm is to act on: one token per group (B, G, C), or, where tokens were dropped, which have last
        values of their own, all positions (B, T, C)."""
        if self.merged or not self.before_drops:
            return self.reduced
        return full_length(self.reduced, self.grouping, self.before_drops)

    def restored(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens in the original number and order, (B, T, C): `self.tokens`, or what a norm made of them. Where the
        plan wants them merged, they are given as they are."""
        tokens = self.tokens if tokens is None else tokens
        if self.merged or self.grouping is None or self.before_drops:
            return tokens
        return self.grouping.unmerge(tokens)


class States:
    """Tokens after chosen blocks, as they leave: full-length, or as merged as they are.

    Merged states that are read side by side must have one token for each of the same groups. They get those of the
    deepest of them: of an earlier one the size-weighted means over their members.
    """

    def __init__(self, merged: bool, side_by_side: tuple[int, ...]) -> None:
        self.merged = merged
        self.together = side_by_side if merged and len(side_by_side) > 1 else ()
        self.kept: list[Tensor] = []
        self.waiting: dict[int, Tensor] = {}  # by their places in kept: full-length

    def keep(self, index: int, x: Tensor, grouping: Grouping | None, before_drops: BeforeDrops) -> None:
        """Keep the tokens x (B, G, C) that a block left."""
        if index in self.together:
            self.waiting[len(self.kept)] = full_length(x, grouping, before_drops)
        self.kept.append(x if self.merged else full_length(x, grouping, before_drops))
        if self.together and index == max(self.together) and grouping is not None:
            for place, full in self.waiting.items():
                self.kept[place] = x if place == len(self.kept) - 1 else grouping.merge(full)


def full_length(x: Tensor, grouping: Grouping | None, before_drops: BeforeDrops) -> Tensor:
    """Every position (B, T, C): its group's token in x (B, G, C), or its last value before it was dropped."""
    if grouping is None:
        return x
    last: Tensor | None = None
    for tokens, before in before_drops:
        last = tokens if before is None else before.unmerge(tokens, last)
    return grouping.unmerge(x, last)
