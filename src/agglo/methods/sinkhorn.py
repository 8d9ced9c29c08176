"""Sinkhorn (Haurum et al., WACV 2022): optimal transport between the tokens and learned centres."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import number
from agglo.methods.registry import register
from agglo.methods.soft import Mixer, SoftMethod


@register
class Sinkhorn(SoftMethod):
    """Mixes all tokens into fewer by an optimal transport plan from their directions to learned ones.

    iterations: how often the plan's rows and columns are normalised in turn.
    temperature: what cosines are divided by; smaller is closer to a hard assignment.
    """

    name: ClassVar[str] = "sinkhorn"
    reference: ClassVar[str] = "Haurum et al., Multi-Scale Hybrid ViT and Sinkhorn Tokenizer, WACV 2022"

    def __init__(self, iterations: int = 3, temperature: float = 1.0) -> None:
        super().__init__()
        self.iterations = number("iterations", iterations, whole=True, minimum=1)
        self.temperature = number("temperature", temperature, above=0)

    def mixer(self, width: int, n_out: int) -> TransportMixer:
        return TransportMixer(width, n_out, self.iterations, self.temperature)


class TransportMixer(Mixer):
    """plan = transport_plan of cosines between centres and tokens; new tokens = plan x / |x|, sums and not means.

    Centres start on the unit sphere and are projected onto it where they are used. Writing the projection back into
    the parameter at every call, as released code does, would differ in second order only, and change a model that is
    merely evaluated.
    """

    def __init__(self, width: int, n_out: int, iterations: int, temperature: float) -> None:
        super().__init__(n_out)
        self.iterations, self.temperature = iterations, temperature
        self.centres = nn.Parameter(F.normalize(torch.randn(n_out, width), dim=-1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            directions = F.normalize(x.float(), dim=-1)
            cosines = F.normalize(self.centres.float(), dim=-1) @ directions.transpose(1, 2)  # (B, n_out, N)
            plan = transport_plan(cosines / self.temperature, self.iterations)
            return (plan @ directions).to(x.dtype), plan


def transport_plan(scores: Tensor, iterations: int) -> Tensor:
    """Return weights (B, K, N): exp(scores), rows and then columns scaled to equal sums, in turns.

    Columns come last and sum to 1: every token is spread over the centres. So with any uniform marginals, 1 / (K + N)
    on both sides and the plan times K + N among them: constants cancel in the next step.
    """
    for _ in range(iterations):
        scores = scores.log_softmax(dim=2)
        scores = scores.log_softmax(dim=1)
    return scores.exp()
