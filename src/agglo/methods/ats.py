"""ATS (Fayyaz et al., ECCV 2022), from its definition: tokens sampled where significance accumulates."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agglo.methods.base import Kind, Method, Outcome, Varies, View
from agglo.methods.registry import register


@register
class ATS(Method):
    """Patches are sampled by the inverse of their cumulative significance: images of few significant ones keep fewer.

    The significance of a patch is the class token's attention to it times the length of its value, summed over heads.
    The released code samples the rows of attention; dropping tokens after it leaves the same ones with the same values.
    """

    name: ClassVar[str] = "ats"
    needs_class_attention: bool = True
    proportional: bool = False
    varies: ClassVar[Varies] = "at_most"
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "any keep rate, as an upper bound: counts differ from image to image"
    reference: ClassVar[str] = "Fayyaz et al., Adaptive Token Sampling, ECCV 2022"

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.class_attention is not None
        assert view.values is not None
        weights = (view.class_attention * view.values.float().norm(dim=-1)).sum(dim=1)[:, view.prefix :]
        return Outcome(view.keep_where(sample(weights.detach(), view.target, view.counts)))


def sample(weights: Tensor, n_samples: int, counts: Tensor | None = None) -> Tensor:
    """Return which patches (B, N) bool are sampled.

    They are the nearest, on the cumulative sum of the normalised weights (B, N), to any of

        u_j = (2 j + 1) / (2 (n_samples + 1)),   j = 0 ... n_samples - 1

    counts: (B,), patches of each image that are no padding.
    """
    cumulative = (weights / (weights.sum(dim=1, keepdim=True) + 1e-6)).cumsum(dim=1)
    if counts is not None:
        padding = torch.arange(weights.shape[1], device=weights.device) >= counts.unsqueeze(1)
        cumulative = cumulative.masked_fill(padding, torch.inf)
    points = (2 * torch.arange(n_samples, device=weights.device) + 1) / (2 * (n_samples + 1))
    nearest = (points[:, None] - cumulative.unsqueeze(1)).abs().argmin(dim=-1)  # (B, n_samples)
    return torch.zeros_like(weights, dtype=torch.bool).scatter(1, nearest, True)
