"""DynamicViT (NeurIPS 2021) and SViT (WACV 2024), from their definitions: learned predictors of which tokens matter.

In training every token stays in the sequence. A mask, drawn by hard Gumbel-softmax so that gradients reach the
predictors, says what is dropped, or passes a block by. The full training loss of DynamicViT is

    cross entropy + trace.loss + distillation_loss(...)         # with agglo.trace(model) as trace: model(x)
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import number
from agglo.grouping import Grouping
from agglo.methods.base import Kind, LearnedMethod, ModelShape, Outcome, Place, Return, Varies, View
from agglo.methods.registry import register

_REVISITING = "Liu et al., Revisiting Token Pruning for Object Detection and Instance Segmentation, WACV 2024"


class Predictor(nn.Module):
    """Predicts log-probabilities (B, N, 2) to keep and to drop each of the tokens (B, N, C).

    Half of the input is the token itself, half the mean of those still kept, by their mask (B, N).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        half, quarter = width // 2, width // 4
        layers = [nn.Linear(width, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)]
        self.decide = nn.Sequential(*layers)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        local, rest = self.embed(x).split([half, x.shape[-1] - half], dim=-1)
        # At least one, for an image of which nothing is kept: a mean of nothing is zero here, not NaN.
        kept = mask.to(rest.dtype).unsqueeze(-1)
        mean = (rest * kept).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(min=1)
        decided: Tensor = self.decide(torch.cat([local, mean.expand_as(rest)], dim=-1))
        return decided.float().log_softmax(dim=-1)


@register
class DynamicViT(LearnedMethod):
    """A learned predictor before each reducing block says which tokens to drop.

    ratio_weight: of the loss that holds the kept share of tokens at the target's: the squared difference, averaged
        over images and stages.
    """

    name: ClassVar[str] = "dynamicvit"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"
    reference: ClassVar[str] = "Rao et al., DynamicViT, NeurIPS 2021"
    preserves: ClassVar[bool] = False

    def __init__(self, ratio_weight: float = 2.0) -> None:
        super().__init__()
        self.ratio_weight = number("ratio_weight", ratio_weight, minimum=0)
        self.predictors = nn.ModuleList()

    def build(self, shape: ModelShape) -> None:
        self.predictors = nn.ModuleList(Predictor(shape.width) for _ in shape.stages)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        before = view.patches.new_ones(view.patches.shape[:2]) if view.policy is None else view.policy[:, view.prefix :]
        decided: Tensor = self.predictors[view.stage](view.patches, before)
        if not view.training:
            return Outcome(view.keep_best(decided[..., 0]))
        mask = F.gumbel_softmax(decided, tau=1.0, hard=True)[..., 0] * before
        policy = F.pad(mask, (view.prefix, 0), value=1.0)
        missed = mask.mean(dim=1) - view.target / mask.shape[1]
        return Outcome(
            Grouping.identity(view.tokens, view.prefix),
            tokens=view.tokens,
            loss=missed.pow(2).mean() * (self.ratio_weight / len(self.predictors)),
            policy=policy,
            processed=policy if self.preserves else None,
        )


@register
class PreservingDynamicViT(DynamicViT):
    """DynamicViT whose dropped tokens keep their last value in training too, for tasks that read all patches.

    At inference that is so for every method that drops tokens; plain DynamicViT goes on updating them as it trains.
    """

    name: ClassVar[str] = "dynamicvit_prsv"
    reference: ClassVar[str] = _REVISITING
    preserves: ClassVar[bool] = True


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, tokens: Tensor, teacher_tokens: Tensor, kept: Tensor
) -> Tensor:
    """Return the loss that keeps a student near its dense teacher.

    0.5 KL(teacher, student) of the classes, and 0.5 mean squared error of the patch tokens that are still kept.

    logits, teacher_logits: (B, classes).
    tokens, teacher_tokens: (B, N, C), patch tokens after the last norm.
    kept: (B, N), the mask of the last stage: `trace.steps[-1].outcome.policy[:, prefix:]`.
    """
    classes = F.kl_div(
        logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1), reduction="batchmean", log_target=True
    )
    alive = (kept.detach() > 0.5).unsqueeze(-1)
    errors = (tokens.float() - teacher_tokens.float()).pow(2) * alive
    mean_error = errors.sum() / (alive.sum() * tokens.shape[-1]).clamp(min=1)
    return 0.5 * classes + 0.5 * mean_error


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
    reference: ClassVar[str] = _REVISITING

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
