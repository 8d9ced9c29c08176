"""From the tokens that are left back to one for every position."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
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
    ends: how many prefix and suffix tokens there are: here suffix tokens follow the prefix tokens, in `kept` and
        `restored` they are last.
    """

    reduced: Tensor
    grouping: Grouping | None
    kept: list[Tensor]
    before_drops: BeforeDrops = field(default_factory=list)
    ends: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> Tensor:
        """What a last norm is to act on: one token per group (B, G, C), or, where tokens were dropped, which have last
        values of their own, all positions (B, T, C)."""
        return full_length(self.reduced, self.grouping, self.before_drops) if self.before_drops else self.reduced

    def restored(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens in the original number and order, (B, T, C): `self.tokens`, or what a norm made of them."""
        tokens = self.tokens if tokens is None else tokens
        full = tokens if self.grouping is None or self.before_drops else self.grouping.unmerge(tokens)
        return in_library_order(full, self.ends)


def ends_first(x: Tensor, ends: tuple[int, int]) -> Tensor:
    """Tokens (B, T, C) with the suffix tokens moved behind the prefix tokens. ends: how many there are of each."""
    prefix, suffix = ends
    if suffix == 0:
        return x
    return torch.cat([x[:, :prefix], x[:, -suffix:], x[:, prefix:-suffix]], dim=1)


def in_library_order(x: Tensor, ends: tuple[int, int]) -> Tensor:
    """Tokens (B, T, C) with the suffix tokens moved from behind the prefix tokens to the end."""
    prefix, suffix = ends
    if suffix == 0:
        return x
    return torch.cat([x[:, :prefix], x[:, prefix + suffix :], x[:, prefix : prefix + suffix]], dim=1)


def full_length(x: Tensor, grouping: Grouping | None, before_drops: BeforeDrops) -> Tensor:
    """Every position (B, T, C): its group's token in x (B, G, C), or its last value before it was dropped."""
    if grouping is None:
        return x
    last: Tensor | None = None
    for tokens, before in before_drops:
        last = tokens if before is None else before.unmerge(tokens, last)
    return grouping.unmerge(x, last)
