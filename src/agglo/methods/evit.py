"""EViT (Liang et al., ICLR 2022), from its definition: keep attentive tokens, fuse the inattentive ones; and Top-K.

Top-K, of the study of Haurum et al. (ICCV workshops 2023), is EViT without its fused token.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from agglo.methods.base import Kind, Method, Outcome, View
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
        scores = view.class_scores
        kept = scores.topk(n_kept, dim=1).indices.sort(dim=1).values
        labels = torch.full_like(scores, n_kept, dtype=torch.int64)
        labels = labels.scatter(1, kept, torch.arange(n_kept, device=kept.device).expand_as(kept))
        weights = scores.masked_fill(labels < n_kept, 0)
        x = view.patches
        fused = (x.float() * weights.unsqueeze(-1)).sum(dim=1, keepdim=True).to(x.dtype)
        attentive = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return Outcome(view.group(labels), torch.cat([view.tokens[:, : view.prefix], attentive, fused], dim=1))


@register
class TopK(Method):
    """The patches that the class token attends to most stay, the others are dropped.

    The score of a patch is the class token's attention to it at the reducing block, averaged over heads.
    """

    name: ClassVar[str] = "topk"
    needs_class_attention: bool = True
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"
    reference: ClassVar[str] = "Haurum et al., Which Tokens to Use?, ICCV workshops 2023"

    def reduce(self, view: View) -> Outcome:
        return Outcome(view.keep_best(view.class_scores))
