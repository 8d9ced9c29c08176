"""ToFu (Kim et al., WACV 2024): one token of a pair stands for both in early blocks, and their mean in later ones."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import number
from agglo.grouping import Grouping
from agglo.methods.base import Outcome, View
from agglo.methods.registry import register
from agglo.methods.tome import PairMerging


@register
class ToFu(PairMerging):
    """Tokens are matched as in ToMe; in early blocks one of each pair is dropped, in later ones the two are merged.

    A merged token has the direction of the mean, and the length of its longest member.

    features: what tokens are compared by, as in ATC.
    pruning: the fraction of the blocks, from the first on, in which tokens are dropped.
    """

    name: ClassVar[str] = "tofu"
    proportional: bool = False
    reference: ClassVar[str] = (
        "Kim et al., Token Fusion: Bridging the Gap between Token Pruning and Token Merging, WACV 2024"
    )

    def __init__(self, features: str = "keys", pruning: float = 0.5) -> None:
        super().__init__(features)
        self.pruning = number("pruning", pruning, minimum=0, maximum=1)

    def reduce(self, view: View) -> Outcome:
        labels, staying = self.matched(view)
        grouping = view.group(labels)
        if view.block >= self.pruning * view.depth:
            return Outcome(grouping, as_long_as_longest(grouping, view.tokens))
        in_front = torch.arange(view.prefix, device=staying.device).expand(len(staying), -1)
        return Outcome(replace(grouping, chosen=torch.cat([in_front, staying + view.prefix], dim=1)))


def as_long_as_longest(grouping: Grouping, tokens: Tensor) -> Tensor:
    """Return one token per group (B, G, C) of tokens (B, T, C): the mean, made as long as the longest member."""
    means = grouping.merge(tokens).float()
    lengths = torch.linalg.vector_norm(tokens.float(), dim=-1)
    longest = torch.zeros_like(grouping.sizes).scatter_reduce(1, grouping.labels, lengths, "amax")
    reached = torch.linalg.vector_norm(means, dim=-1)
    means = means * (longest / torch.where(reached > 0, reached, 1.0)).unsqueeze(-1)
    return torch.cat([tokens[:, : grouping.prefix], means[:, grouping.prefix :].to(tokens.dtype)], dim=1)
