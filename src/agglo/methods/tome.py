"""ToMe (Bolya et al., ICLR 2023), from its definition: one round of bipartite soft matching per reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.checks import choice, one_or_each
from agglo.grouping import MEANS, Mean
from agglo.methods.base import FEATURES, Method, Outcome, View
from agglo.methods.registry import register


@register
class ToMe(Method):
    """Tokens at even positions (class token first) merge with their most similar token at an odd one, best pairs first.

    At most half of the tokens can go at one block. Afterwards they are in the order of the released code, on which the
    next block's split into even and odd depends: first the even ones that found no partner, then all odd ones.

    features: what tokens are compared by, as in ATC; a list has an entry for each reduction.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    """

    name: ClassVar[str] = "tome"
    per_reduction: ClassVar[tuple[str, ...]] = ("features",)
    reach: ClassVar[str] = "0.5 and above; half of an odd count rounds up"
    reference: ClassVar[str] = "Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023"

    def __init__(self, features: str | Sequence[str] = "keys", mean: Mean = "plain") -> None:
        self.features = one_or_each("features", features, FEATURES)
        self.mean = choice("mean", mean, MEANS)

    def reachable(self, n_tokens: int, target: int) -> int:
        least = self.least(n_tokens)
        if target < n_tokens - least:
            raise ValueError(
                f"tome cannot go from {n_tokens} to {target} patch tokens at one block: it merges pairs, so at least "
                f"{least} stay. Use keep rates of 0.5 or more, more blocks, or method='atc'"
            )
        return max(target, least)

    def least(self, n_tokens: int) -> int:
        return n_tokens - n_tokens // 2

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = F.normalize(view.features(self.option_at("features", view.stage)).float(), dim=-1)
        n_merges = int(features.shape[1]) - view.target
        # The released code sorts the even tokens by position again only if a class token must come first.
        labels = match(features, n_merges, first_seeker=view.prefix % 2, by_similarity=view.prefix == 0)
        return Outcome(view.group(labels), mean=self.mean)


def match(features: Tensor, n_merges: int, first_seeker: int = 0, by_similarity: bool = False) -> Tensor:
    """Return labels (B, N) after bipartite matching of unit features (B, N, D).

    Seekers are every second token from first_seeker on, the others stay. The n_merges seekers with the most similar
    stayer join it. Groups are numbered by the token that stays: first the seekers that are left, by position or most
    similar first, then the stayers.
    """
    batch, n_tokens, _ = features.shape
    positions = torch.arange(n_tokens, device=features.device)
    seekers, stayers = positions[first_seeker::2], positions[1 - first_seeker :: 2]
    with torch.autocast(features.device.type, enabled=False):
        similarity = features[:, first_seeker::2] @ features[:, 1 - first_seeker :: 2].transpose(1, 2)
    best, partner = similarity.max(dim=-1)
    most_similar_first = best.argsort(dim=-1, descending=True)  # (B, seekers), indices into seekers
    leaving, left = most_similar_first[:, :n_merges], most_similar_first[:, n_merges:]
    leader = positions.expand(batch, n_tokens).scatter(1, seekers[leaving], stayers[partner.gather(1, leaving)])
    left = left if by_similarity else left.sort(dim=1).values
    leaders = torch.cat([seekers[left], stayers.expand(batch, -1)], dim=1)  # (B, groups), positions
    numbers = torch.arange(n_tokens - n_merges, device=features.device).expand(batch, -1)
    return torch.zeros_like(leader).scatter(1, leaders, numbers).gather(1, leader)
