"""PatchMerger (Renggli et al., 2022): learned queries attend to the tokens, and what they read replaces them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from agglo.methods.registry import register
from agglo.methods.soft import Mixer, SoftMethod


@register
class PatchMerger(SoftMethod):
    """Mixes all tokens into fewer by the attention of learned queries, one for each new token."""

    name: ClassVar[str] = "patch_merger"
    reference: ClassVar[str] = "Renggli et al., Learning to Merge Tokens in Vision Transformers, 2022"

    def mixer(self, width: int, n_out: int) -> QueryMixer:
        return QueryMixer(width, n_out)


class QueryMixer(Mixer):
    """weights = softmax over the tokens of queries . LayerNorm(x), unscaled; new tokens = weights LayerNorm(x)."""

    def __init__(self, width: int, n_out: int) -> None:
        super().__init__(n_out)
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(n_out, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        logits = self.queries.to(x.dtype) @ x.transpose(1, 2)  # (B, n_out, N)
        weights = logits.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        return weights @ x, weights
