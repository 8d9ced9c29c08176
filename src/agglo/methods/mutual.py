"""Mutual nearest pairs (Ravé et al., CVPR 2026): rounds of merging, of which agglomerative clustering has many."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.checks import choice
from agglo.grouping import MEANS, Mean
from agglo.methods.base import FEATURES, Method, Outcome, View, refuse_onnx
from agglo.methods.registry import register


@register
class MutualPairs(Method):
    """All tokens that are each other's most similar merge, in rounds until the count is reached.

    The published method is one round, which leaves as many tokens as it happens to. Here the last round merges only the
    most similar of its pairs, and where one round is too little another one follows, of groups that are as similar as
    their members on average. So counts are exact; ATC with average linkage merges the same pairs, but in order.

    features: what tokens are compared by, as in ATC.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    """

    name: ClassVar[str] = "mutual"
    reference: ClassVar[str] = "Ravé et al., MPM: Mutual Pair Merging for Efficient Vision Transformers, CVPR 2026"

    def __init__(self, features: str = "keys", mean: Mean = "plain") -> None:
        self.features = choice("features", features, FEATURES)
        self.mean = choice("mean", mean, MEANS)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        refuse_onnx("merging in rounds")
        directions = F.normalize(view.features(self.features).float(), dim=-1)
        with torch.autocast(directions.device.type, enabled=False):
            labels = in_rounds(directions, view.target)
        return Outcome(view.group(labels), mean=self.mean)


@torch.library.custom_op("agglo::mutual_pairs", mutates_args=())
def in_rounds(directions: Tensor, target: int) -> Tensor:
    """Return labels (B, N) of target groups of unit vectors (B, N, D), after rounds of merging mutual pairs.

    Two groups are as similar as their members on average: the product of their mean vectors. Of equally similar ones
    the first counts. Groups are numbered by their first members.
    """
    batch, n_tokens, _ = directions.shape
    positions = torch.arange(n_tokens, device=directions.device).expand(batch, -1)
    sums, leader = directions.nan_to_num(), positions  # of NaN come some groups, without meaning
    sizes = torch.ones(batch, n_tokens, device=directions.device)
    while bool((surplus := (sizes > 0).sum(dim=1, keepdim=True) - target).any()):
        means = sums / sizes.clamp(min=1).unsqueeze(2)
        there = sizes > 0
        apart = ~(there.unsqueeze(1) & there.unsqueeze(2)) | torch.eye(n_tokens, dtype=torch.bool, device=sums.device)
        similarity = (means @ means.transpose(1, 2)).triu()
        similarity = (similarity + similarity.transpose(1, 2)).masked_fill(apart, -torch.inf)
        best = similarity.amax(dim=2)
        nearest = torch.where(similarity == best.unsqueeze(2), positions.unsqueeze(1), n_tokens).amin(dim=2)
        leaves = (nearest.gather(1, nearest) == positions) & (nearest < positions) & there
        order = best.masked_fill(~leaves, -torch.inf).argsort(dim=1, descending=True, stable=True)
        leaves = leaves & (order.argsort(dim=1) < surplus)
        into = torch.where(leaves, nearest, positions)
        leader = into.gather(1, leader)
        sums = torch.zeros_like(sums).scatter_add(1, into.unsqueeze(2).expand_as(sums), sums)
        sizes = torch.zeros_like(sizes).scatter_add(1, into, sizes)
    return ((leader == positions).long().cumsum(dim=1) - 1).gather(1, leader)


@in_rounds.register_fake
def _(directions: Tensor, target: int) -> Tensor:
    return directions.new_empty(directions.shape[:2], dtype=torch.int64)
