"""EViT (Liang et al., ICLR 2022), from its definition: keep attentive tokens, fuse the inattentive ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import Kind, Method, Outcome, View
from agglo.methods.helpers.selection import best, class_scores
from agglo.methods.registry import register


@register
class EViT(Method):
    """The patches that the class token attends to most stay, the others are fused into one more token.

    With a_j the class token's attention to patch j, averaged over heads, the fused token is the sum of a_j x_j over the
    fused patches, not divided by the sum of a_j. It comes last, and at the next stage it is a patch like any other.
    """

    name: ClassVar[str] = "evit"
    needs_class_attention: bool = True
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "any keep rate, and one fused token more"
    reference: ClassVar[str] = "Liang et al., Not All Patches Are What You Need, ICLR 2022"

    @property
    def mixes(self) -> bool:
        return True  # in the fused token

    def reachable(self, n_tokens: int, target: int) -> int:
        """The fused token comes on top."""
        return target + 1

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        n_kept = view.target - 1
        scores = class_scores(view)
        kept = best(scores, n_kept)
        labels = torch.full_like(scores, n_kept, dtype=torch.int64)
        labels = labels.scatter(1, kept, torch.arange(n_kept, device=kept.device).expand_as(kept))
        grouping = Grouping.of(labels, view.target, view.prefix, view.sizes)
        weights = scores.masked_fill(labels < n_kept, 0)
        tokens = torch.cat(
            [view.tokens[:, : view.prefix], _at(view.patches, kept), _fused(view.patches, weights)], dim=1
        )
        return Outcome(grouping, tokens)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _fused(x: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of x (B, N, C), (B, 1, C), in float32 and then the dtype of x."""
    return (x.float() * weights.unsqueeze(-1)).sum(dim=1, keepdim=True).to(x.dtype)
