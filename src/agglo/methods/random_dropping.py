"""Random dropping: the baseline of every pruning method."""

from __future__ import annotations

from typing import ClassVar

import torch

from agglo.checks import number
from agglo.methods.base import Kind, Method, Outcome, View
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
        self.seed = None if seed is None else number("seed", seed, whole=True)

    def reduce(self, view: View) -> Outcome:
        device = view.tokens.device
        generator = None
        if self.seed is not None:
            # One for each call, since two threads may run one model.
            generator = torch.Generator(device).manual_seed(self.seed + view.stage)
        scores = torch.rand(view.patches.shape[:2], device=device, generator=generator)
        return Outcome(view.keep_best(scores))
