"""ToMe (Bolya et al., ICLR 2023), from its published definition: one round of bipartite soft matching per reduction."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import Method, Outcome, View
from agglo.methods.features import patch_features, require_known
from agglo.methods.registry import register


@register
class ToMe(Method):
    """Tokens at even positions (class token first) look for their most similar token at an odd position; the most
    similar pairs merge. At most half of the tokens can go at one block.

    features: what tokens are compared by, as in ATC.
    """

    name: ClassVar[str] = "tome"
    reach: ClassVar[str] = "0.5 and above; half of an odd count rounds up"
    reference: ClassVar[str] = "Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023"

    def __init__(self, features: str = "keys") -> None:
        self.features = require_known(features)

    def options(self) -> dict[str, Any]:
        return {"features": self.features}

    def reachable(self, n_tokens: int, target: int) -> int:
        """Half of an odd count rounds up: 49 tokens become 25, not 24. Fewer than half is out of reach."""
        half = n_tokens // 2
        if target < half:
            raise ValueError(
                f"tome cannot go from {n_tokens} to {target} patch tokens at one block: it merges pairs, so at least "
                f"{n_tokens - half} stay. Use keep rates of 0.5 or more, more blocks, or method='atc'"
            )
        return max(target, n_tokens - half)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = F.normalize(patch_features(view, self.features).float(), dim=-1)
        labels = match(features, int(features.shape[1]) - view.target, first_seeker=view.prefix % 2)
        return Outcome(Grouping.of(labels, view.target, view.prefix, view.sizes))


def match(features: Tensor, n_merges: int, first_seeker: int = 0) -> Tensor:
    """Labels (B, N) after bipartite matching of unit features (B, N, D).

    Seekers are every second token from first_seeker on, the others stay. The n_merges seekers with the most similar
    stayer join it. Groups are numbered by the position of the token that stays.
    """
    batch, n_tokens, _ = features.shape
    positions = torch.arange(n_tokens, device=features.device)
    seekers, stayers = positions[first_seeker::2], positions[1 - first_seeker :: 2]
    with torch.autocast(features.device.type, enabled=False):
        similarity = features[:, first_seeker::2] @ features[:, 1 - first_seeker :: 2].transpose(1, 2)
    best, partner = similarity.max(dim=-1)
    leaving = best.topk(n_merges, dim=-1).indices  # (B, n_merges), indices into seekers
    leader = positions.expand(batch, n_tokens).scatter(1, seekers[leaving], stayers[partner.gather(1, leaving)])
    stays = leader == positions
    number = stays.long().cumsum(dim=1) - 1
    return number.gather(1, leader)
