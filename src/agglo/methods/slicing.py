"""Token reduction at no cost: the time that a model's blocks take with so many tokens."""

from __future__ import annotations

from typing import ClassVar

import torch

from agglo.grouping import Grouping
from agglo.methods.base import Method, Outcome, View
from agglo.methods.registry import register


@register
class Slice(Method):
    """The first tokens stay and the others join the last of them on paper; nothing is compared or averaged."""

    name: ClassVar[str] = "free"
    listed: ClassVar[bool] = False

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        batch, n_tokens, _ = view.tokens.shape
        left = view.prefix + view.target
        labels = torch.arange(n_tokens, device=view.tokens.device).clamp(max=left - 1).expand(batch, n_tokens)
        sizes = torch.ones(batch, left, device=view.tokens.device)
        return Outcome(Grouping(labels, sizes, view.prefix), tokens=view.tokens[:, :left])
