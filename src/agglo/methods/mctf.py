"""MCTF (Lee et al., CVPR 2024): tokens merge by likeness, by how little attention they receive, and by their sizes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import number
from agglo.grouping import Grouping
from agglo.methods.base import Outcome, View
from agglo.methods.registry import register
from agglo.methods.tome import PairMerging, numbered

_TINY = torch.finfo(torch.float32).tiny


@register
class MCTF(PairMerging):
    """Pairs that are alike, receive little attention and are small merge first, matched in both directions.

    With c their cosine similarity, a the attention that each receives at this block, and s their sizes, two tokens
    attract each other by (c + 1) / 2 * (a_i a_j) ** -attention * (s_i s_j) ** -size. Half of the merges go from even
    to odd positions, then the other half from odd ones to what is left of the even ones. A merged token is the mean of
    its members, weighted by a times s.

    The authors fuse tokens between the weights of a block's attention and its output, and so use the attention one step
    ahead of the tokens. Here they are fused after the output, which knows the same attention.

    features: what tokens are compared by, as in ATC.
    attention, size: exponents; the authors' are 1/20 and 1/40.
    """

    name: ClassVar[str] = "mctf"
    needs_attention_received: bool = True
    reference: ClassVar[str] = "Lee et al., Multi-criteria Token Fusion with One-step-ahead Attention, CVPR 2024"

    def __init__(self, features: str = "tokens", attention: float = 0.05, size: float = 0.025) -> None:
        super().__init__(features)
        self.attention = number("attention", attention, minimum=0, maximum=1)
        self.size = number("size", size, minimum=0, maximum=1)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.attention_received is not None
        received = view.attention_received[:, view.prefix :].detach().float().clamp(min=_TINY)
        sizes = torch.ones_like(received) if view.sizes is None else view.sizes[:, view.prefix :].clamp(min=1)
        weights = received.pow(-self.attention) * sizes.pow(-self.size)
        features = self.directions(view)
        with torch.autocast(features.device.type, enabled=False):
            similarity = features @ features.transpose(1, 2)
        attraction = (similarity + 1) / 2 * weights.unsqueeze(1) * weights.unsqueeze(2)
        grouping = view.group(numbered(matched_both_ways(attraction, int(features.shape[1]) - view.target)))
        return Outcome(grouping, weighted_means(grouping, view.tokens, received * sizes))


def matched_both_ways(attraction: Tensor, n_merges: int) -> Tensor:
    """Return the position of the token that each joins (B, N), from attractions (B, N, N)."""
    batch, n_tokens, _ = attraction.shape
    positions = torch.arange(n_tokens, device=attraction.device)
    even, odd = positions[::2], positions[1::2]
    between = attraction[:, ::2, 1::2]
    forwards = (n_merges + 1) // 2
    best, partner = between.max(dim=2)
    leaving = best.topk(forwards, dim=1).indices
    leader = positions.expand(batch, -1).scatter(1, even[leaving], odd[partner.gather(1, leaving)])
    gone = torch.zeros_like(best).scatter(1, leaving, torch.inf)
    best, partner = (between - gone.unsqueeze(2)).max(dim=1)
    leaving = best.topk(n_merges - forwards, dim=1).indices
    leader = leader.scatter(1, odd[leaving], even[partner.gather(1, leaving)])
    return leader.gather(1, leader)  # who joined an odd token goes with it


def weighted_means(grouping: Grouping, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return one token per group (B, G, C) of tokens (B, T, C), whose patches have weights (B, N) in the means."""
    weights = torch.cat([weights.new_ones(len(weights), grouping.prefix), weights], dim=1)
    sums = torch.zeros_like(grouping.sizes).scatter_add(1, grouping.labels, weights)
    shares = weights / sums.gather(1, grouping.labels).clamp(min=_TINY)
    return Grouping(grouping.labels, torch.ones_like(sums), grouping.prefix, shares).merge(tokens)
