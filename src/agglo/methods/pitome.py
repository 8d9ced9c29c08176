"""PiToMe (Tran et al., NeurIPS 2024): tokens with many that resemble them merge, all others are protected."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import choice, number
from agglo.grouping import MEANS, Mean
from agglo.methods.base import Outcome, View
from agglo.methods.registry import register
from agglo.methods.tome import PairMerging, numbered


@register
class PiToMe(PairMerging):
    """Tokens of high energy, which have many alike, merge in pairs, and those of low energy are protected.

    The energy of a token is the mean over all tokens of f(c), c their cosine similarity, with f(c) = c where it is at
    least m, and alpha (exp(c - m) - 1) below. To remove r tokens, the 2r of highest energy are sorted by it, and
    every second of them, from the first on, joins the most similar of the others. At block l of L, m is
    margin (1 - l / L).

    features: what tokens are compared by, as in ATC.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    """

    name: ClassVar[str] = "pitome"
    reference: ClassVar[str] = (
        "Tran et al., Accelerating Transformers with Spectrum-Preserving Token Merging, NeurIPS 2024"
    )

    def __init__(self, features: str = "keys", mean: Mean = "plain", margin: float = 0.9, alpha: float = 1.0) -> None:
        super().__init__(features)
        self.mean = choice("mean", mean, MEANS)
        self.margin, self.alpha = number("margin", margin, minimum=0), number("alpha", alpha, minimum=0)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        features = self.directions(view)
        with torch.autocast(features.device.type, enabled=False):
            similarity = features @ features.transpose(1, 2)
        n_merges = int(features.shape[1]) - view.target
        energy = self.energy(similarity, self.margin * (1 - view.block / view.depth))
        may_merge = energy.argsort(dim=1, descending=True, stable=True)[:, : 2 * n_merges]
        leaving, staying = may_merge[:, ::2], may_merge[:, 1::2]
        rows = similarity.gather(1, leaving.unsqueeze(-1).expand(-1, -1, similarity.shape[2]))
        partner = rows.gather(2, staying.unsqueeze(1).expand(-1, n_merges, -1)).argmax(dim=2)
        positions = torch.arange(similarity.shape[1], device=similarity.device).expand(len(similarity), -1)
        leader = positions.scatter(1, leaving, staying.gather(1, partner))
        return Outcome(view.group(numbered(leader)), mean=self.mean)

    def energy(self, similarity: Tensor, margin: float) -> Tensor:
        """Return the energies (B, N) of tokens with cosine similarities (B, N, N)."""
        below = self.alpha * torch.expm1(similarity - margin)
        return torch.where(similarity >= margin, similarity, below).mean(dim=2)
