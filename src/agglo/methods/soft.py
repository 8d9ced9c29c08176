"""The base of soft methods: every new token is a weighted sum of all patch tokens, with learned weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from agglo.methods.base import Kind, LearnedMethod, ModelShape, Outcome, View


class Mixer(nn.Module, ABC):
    """Mix patch tokens (B, N, C) into n_out new ones."""

    def __init__(self, n_out: int) -> None:
        super().__init__()
        self.n_out = n_out

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens (B, n_out, C) and the weights (B, n_out, N) of the old ones in them."""


class SoftMethod(LearnedMethod):
    """A `Mixer` for each stage.

    The grouping is each old token's strongest new one, for traces, drawings and unmerging; a new token that is the
    strongest of none has size 1, since 0 would mean padding.
    """

    place = "before_block"
    proportional: bool = False
    kind: ClassVar[Kind] = "merges soft"

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList()

    @abstractmethod
    def mixer(self, width: int, n_out: int) -> Mixer:
        """Return a new mixer from tokens of so many channels to n_out tokens."""

    def build(self, shape: ModelShape) -> None:
        self.mixers = nn.ModuleList(self.mixer(shape.width, n_out) for _, n_out in shape.stages)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        counts = [mixer.n_out for mixer in self.mixers]
        if counts[view.stage : view.stage + 1] != [view.target]:
            raise ValueError(
                f"{self.name} was built for {counts} patch tokens after its stages and cannot leave {view.target} "
                f"after stage {view.stage}: its parameters fit one input size and schedule"
            )
        tokens, weights = self.mixers[view.stage](view.patches)
        strongest = weights.detach().argmax(dim=1)
        grouping = view.group(strongest)
        grouping = replace(grouping, sizes=grouping.sizes.clamp(min=1))
        new = torch.cat([view.tokens[:, : view.prefix], tokens], dim=1)
        return Outcome(grouping, new, weights=weights.detach())


def linear(width_in: int, width_out: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer, initialised as in vision transformers: normal with deviation 0.02, bias 0."""
    layer = nn.Linear(width_in, width_out, bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
