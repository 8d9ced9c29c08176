"""Soft methods: every new token is a weighted sum of all patch tokens, with learned weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import number
from agglo.methods.base import Kind, LearnedMethod, ModelShape, Outcome, Place, View
from agglo.methods.registry import register


class SoftMethod(LearnedMethod):
    """A mixer for each stage: a module that makes new tokens, and the weights of the old ones in them.

    The grouping is each old token's strongest new one, for traces, drawings and unmerging; a new token that is the
    strongest of none has size 1, since 0 would mean padding.
    """

    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    kind: ClassVar[Kind] = "merges soft"
    # Of width and n_out: from patch tokens (B, N, width) to new ones (B, n_out, width) and weights (B, n_out, N).
    mixer: Callable[[int, int], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.mixers = nn.ModuleList()

    def build(self, shape: ModelShape) -> None:
        self.counts = [n_out for _, n_out in shape.stages]
        self.mixers = nn.ModuleList(self.mixer(shape.width, n_out) for n_out in self.counts)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        counts = self.counts
        if counts[view.stage : view.stage + 1] != [view.target]:
            raise ValueError(
                f"{self.name} was built for {counts} patch tokens after its stages and cannot leave {view.target} "
                f"after stage {view.stage}: its parameters fit one input size and schedule"
            )
        tokens, weights = self.mixers[view.stage](view.patches)
        grouping = view.group(weights.detach().argmax(dim=1))
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


class TokenSlimming(nn.Module):
    """weights = softmax over the tokens of scale * MLP(LayerNorm(x)); new tokens = weights x, x not normalised."""

    def __init__(self, width: int, n_out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # No bias at the end: the same for all tokens, it would cancel in the softmax.
        self.mlp = nn.Sequential(linear(width, width // 2), nn.GELU(), linear(width // 2, n_out, bias=False))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.mlp(self.norm(x)) * self.scale  # (B, N, n_out)
        weights = logits.transpose(1, 2).softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        return weights @ x, weights


@register
class SiT(SoftMethod):
    """Mixes all tokens into fewer by weights that an MLP reads off each token (the token slimming module).

    Without the distillation of the original paper, as in the study.
    """

    name: ClassVar[str] = "sit"
    reference: ClassVar[str] = "Zong et al., Self-slimmed Vision Transformer, ECCV 2022"
    mixer = TokenSlimming


class QueryMixer(nn.Module):
    """weights = softmax over the tokens of queries . LayerNorm(x), unscaled; new tokens = weights LayerNorm(x)."""

    def __init__(self, width: int, n_out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(n_out, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        logits = self.queries.to(x.dtype) @ x.transpose(1, 2)  # (B, n_out, N)
        weights = logits.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        return weights @ x, weights


@register
class PatchMerger(SoftMethod):
    """Mixes all tokens into fewer by the attention of learned queries, one for each new token."""

    name: ClassVar[str] = "patch_merger"
    reference: ClassVar[str] = "Renggli et al., Learning to Merge Tokens in Vision Transformers, 2022"
    mixer = QueryMixer


class TransportMixer(nn.Module):
    """plan = transport_plan of cosines between centres and tokens; new tokens = plan x / |x|, sums and not means.

    Centres start on the unit sphere and are projected onto it where they are used. Writing the projection back into
    the parameter at every call, as released code does, would change a model that is merely evaluated.
    """

    def __init__(self, width: int, n_out: int, iterations: int, temperature: float) -> None:
        super().__init__()
        self.iterations, self.temperature = iterations, temperature
        self.centres = nn.Parameter(F.normalize(torch.randn(n_out, width), dim=-1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            directions = F.normalize(x.float(), dim=-1)
            cosines = F.normalize(self.centres.float(), dim=-1) @ directions.transpose(1, 2)  # (B, n_out, N)
            plan = transport_plan(cosines / self.temperature, self.iterations)
            return (plan @ directions).to(x.dtype), plan


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
        self.mixer = partial(TransportMixer, iterations=self.iterations, temperature=self.temperature)


def transport_plan(scores: Tensor, iterations: int) -> Tensor:
    """Return weights (B, K, N): exp(scores), rows and then columns scaled to equal sums, in turns.

    Columns come last and sum to 1: every token is spread over the centres. Any uniform marginals give the same up to
    a factor.
    """
    for _ in range(iterations):
        scores = scores.log_softmax(dim=2).log_softmax(dim=1)
    return scores.exp()
