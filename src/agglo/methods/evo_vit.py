"""Evo-ViT (Xu et al., AAAI 2022), as released: tokens the class token looks at little pass a stage by as placeholders.

The paper also moves placeholders along with a representative token; the released DeiT code does not, nor does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from agglo.checks import flag, number
from agglo.methods.base import Kind, Method, ModelShape, Outcome, Place, Return, View
from agglo.methods.registry import register
from agglo.schedule import Rates, Schedule, Stages


@register
class EvoViT(Method):
    """The patches that the class token attended to most so far are processed for a stage, the others pass it by.

    What is remembered of a patch is the class token's attention to it, summed over heads: that of the block before the
    first stage, then a running mean over the blocks that process it. A keep rate is of all patches, at every stage: at
    blocks 4 to 7 and 8 to 11 of 12, unless blocks are given.

    momentum: how much of the mean is the latest block's.
    per_block: choose anew before every block, as the detectors do, and not once per stage.
    """

    name: ClassVar[str] = "evovit"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    remembers: ClassVar[bool] = True
    tokens_return: ClassVar[Return] = "after_stage"
    kind: ClassVar[Kind] = "skips"
    reference: ClassVar[str] = "Xu et al., Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer, AAAI 2022"

    def __init__(self, momentum: float = 0.5, per_block: bool = False) -> None:
        self.momentum = number("momentum", momentum, above=0, maximum=1)
        self.per_block = flag("per_block", per_block)
        self.tokens_return = "after_block" if per_block else "after_stage"  # type: ignore[misc]

    def schedule(self, keep_rate: Rates, blocks: Sequence[int] | None) -> Schedule:
        return Stages(keep_rate, blocks, returning=True)

    def check(self, shape: ModelShape) -> None:
        super().check(shape)
        if 0 in shape.blocks:
            raise ValueError(
                "evovit ranks patches by the class attention of earlier blocks, and block 0 has none: let a later "
                "block reduce first"
            )

    def remember(self, class_attention: Tensor, memory: Tensor | None) -> Tensor:
        latest = class_attention.sum(dim=1)
        return latest if memory is None else (1 - self.momentum) * memory + self.momentum * latest

    def reduce(self, view: View) -> Outcome:
        assert view.memory is not None
        return Outcome(view.keep_best(view.memory[:, view.prefix :]))
