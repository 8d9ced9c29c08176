"""Top-K pruning, from the study of Haurum et al. (ICCV workshops 2023): EViT without its fused token."""

from __future__ import annotations

from typing import ClassVar

from agglo.methods.base import Kind, Method, Outcome, View
from agglo.methods.helpers.selection import class_scores, keep_best
from agglo.methods.registry import register


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
        assert view.target is not None
        return Outcome(keep_best(view, class_scores(view), view.target))
