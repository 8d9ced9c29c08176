"""Random dropping: the yardstick that every pruning method has to beat."""

from __future__ import annotations

from typing import ClassVar

import torch

from agglo.methods.base import Kind, Method, Outcome, View
from agglo.methods.helpers.selection import keep_best
from agglo.methods.registry import register


@register
class RandomDropping(Method):
    """Patches are dropped at random, each image its own.

    seed: None draws from torch's generator, anew at every pass; a number makes every pass draw the same.
    """

    name: ClassVar[str] = "random"
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        device = view.tokens.device
        generator = None
        if self.seed is not None:
            # Of its own for each call, since two threads may run one model.
            generator = torch.Generator(device).manual_seed(self.seed + view.stage)
        scores = torch.rand(view.patches.shape[:2], device=device, generator=generator)
        return Outcome(keep_best(view, scores, view.target))
