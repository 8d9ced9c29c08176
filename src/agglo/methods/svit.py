"""SViT (Liu et al., WACV 2024), from its definition: at every block a gate says which tokens it processes.

The others pass the block by unchanged and may be processed again later, so that detectors see a full grid. In training
all tokens stay, with the decisions as masks that carry gradients; `trace.loss` holds the shares of processed tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import number
from agglo.grouping import Grouping
from agglo.methods.base import Kind, LearnedMethod, ModelShape, Outcome, Place, Return, Varies, View
from agglo.methods.registry import register


class Gate(nn.Module):
    """Predicts log-probabilities (B, N, 2), in float32, to process and to skip each of the tokens (B, N, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.decide = nn.Sequential(nn.Linear(width, width // 4), nn.GELU(), nn.Linear(width // 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        decided: Tensor = self.decide(self.norm(x))
        return decided.float().log_softmax(dim=-1)


@register
class SViT(LearnedMethod):
    """A learned gate before each block says which tokens it processes; the others pass by and may come back.

    How many is up to each image. Training holds the share over a batch at the schedule's: the loss is the squared
    difference, averaged over the gated blocks. Inference takes the likelier decision; the released code draws then too.

    loss_weight: of that loss.
    """

    name: ClassVar[str] = "svit"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    varies: ClassVar[Varies] = "about"
    tokens_return: ClassVar[Return] = "after_block"
    kind: ClassVar[Kind] = "skips"
    reach: ClassVar[str] = "any keep rate, as what training aims at: counts differ from image to image"
    reference: ClassVar[str] = (
        "Liu et al., Revisiting Token Pruning for Object Detection and Instance Segmentation, WACV 2024"
    )

    def __init__(self, loss_weight: float = 4.0) -> None:
        super().__init__()
        self.loss_weight = number("loss_weight", loss_weight, minimum=0)
        self.gates = nn.ModuleList()

    def build(self, shape: ModelShape) -> None:
        self.gates = nn.ModuleList(Gate(shape.width) for _ in shape.blocks)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        decided: Tensor = self.gates[view.stage](view.patches)
        if view.training:
            mask = F.gumbel_softmax(decided, tau=1.0, hard=True)[..., 0]
            missed = mask.mean() - view.target / mask.shape[1]
            return Outcome(
                Grouping.identity(view.tokens, view.prefix),
                tokens=view.tokens,
                loss=missed.pow(2) * (self.loss_weight / len(self.gates)),
                processed=F.pad(mask, (view.prefix, 0), value=1.0),
            )
        return Outcome(view.keep_where(decided[..., 0] >= decided[..., 1]))
