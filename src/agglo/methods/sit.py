"""SiT (Zong et al., ECCV 2022): a small MLP says how much of each token goes into every new one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from agglo.methods.registry import register
from agglo.methods.soft import Mixer, SoftMethod, linear


@register
class SiT(SoftMethod):
    """Mixes all tokens into fewer by weights that an MLP reads off each token (the token slimming module).

    Without the distillation of the original paper, as in the study.
    """

    name: ClassVar[str] = "sit"
    reference: ClassVar[str] = "Zong et al., Self-slimmed Vision Transformer, ECCV 2022"

    def mixer(self, width: int, n_out: int) -> TokenSlimming:
        return TokenSlimming(width, n_out)


class TokenSlimming(Mixer):
    """weights = softmax over the tokens of scale * MLP(LayerNorm(x)); new tokens = weights x, x not normalised."""

    def __init__(self, width: int, n_out: int) -> None:
        super().__init__(n_out)
        self.norm = nn.LayerNorm(width)
        # No bias at the end: the same for all tokens, it would cancel in the softmax.
        self.mlp = nn.Sequential(linear(width, width // 2), nn.GELU(), linear(width // 2, n_out, bias=False))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.mlp(self.norm(x)) * self.scale  # (B, N, n_out)
        weights = logits.transpose(1, 2).softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        return weights @ x, weights
