"""Methods that go by what the class token attends to: Top-K, EViT, ATS and Evo-ViT, from their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import flag, number
from agglo.methods.base import Kind, Method, Outcome, Place, Varies, View
from agglo.methods.registry import register
from agglo.schedule import Rates, Schedule, Stages


@register
class TopK(Method):
    """The patches that the class token attends to most stay, the others are dropped.

    The score of a patch is the class token's attention to it at the reducing block, averaged over heads.
    """

    name: ClassVar[str] = "topk"
    needs_class_attention: bool = True
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"
    reference: ClassVar[str] = "Haurum et al., Which Tokens to Use?, ICCV workshops 2023"

    def reduce(self, view: View) -> Outcome:
        return Outcome(view.keep_best(view.class_scores))


@register
class EViT(Method):
    """The patches that the class token attends to most stay, the others are fused into one more token.

    With a_j the class token's attention to patch j, averaged over heads, the fused token is the sum of a_j x_j over the
    fused patches, not divided by the sum of a_j. It comes last, and at the next stage it is a patch like any other.
    """

    name: ClassVar[str] = "evit"
    needs_class_attention: bool = True
    proportional: bool = False
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "any keep rate, and one fused token more"
    reference: ClassVar[str] = "Liang et al., Not All Patches Are What You Need, ICLR 2022"

    @property
    def mixes(self) -> bool:
        return True  # in the fused token

    def reachable(self, n_tokens: int, target: int) -> int:
        return target + 1

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        n_kept, scores, x = view.target - 1, view.class_scores, view.patches
        kept = scores.topk(n_kept, dim=1).indices.sort(dim=1).values
        labels = torch.full_like(scores, n_kept, dtype=torch.int64)
        labels = labels.scatter(1, kept, torch.arange(n_kept, device=kept.device).expand_as(kept))
        weights = scores.masked_fill(labels < n_kept, 0)
        fused = (x.float() * weights.unsqueeze(-1)).sum(dim=1, keepdim=True).to(x.dtype)
        attentive = x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return Outcome(view.group(labels), torch.cat([view.tokens[:, : view.prefix], attentive, fused], dim=1))


@register
class ATS(Method):
    """Patches are sampled by the inverse of their cumulative significance: images of few significant ones keep fewer.

    The significance of a patch is the class token's attention to it times the length of its value, summed over heads.
    The released code samples the rows of attention; dropping tokens after it leaves the same ones with the same values.
    """

    name: ClassVar[str] = "ats"
    needs_class_attention: bool = True
    proportional: bool = False
    varies: ClassVar[Varies] = "at_most"
    kind: ClassVar[Kind] = "prunes"
    reach: ClassVar[str] = "any keep rate, as an upper bound: counts differ from image to image"
    reference: ClassVar[str] = "Fayyaz et al., Adaptive Token Sampling, ECCV 2022"

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        assert view.class_attention is not None
        assert view.values is not None
        weights = (view.class_attention * view.values.float().norm(dim=-1)).sum(dim=1)[:, view.prefix :]
        return Outcome(view.keep_where(sample(weights.detach(), view.target, view.counts)))


def sample(weights: Tensor, n_samples: int, counts: Tensor | None = None) -> Tensor:
    """Return which patches (B, N) bool are sampled.

    They are the nearest, on the cumulative sum of the normalised weights (B, N), to any of

        u_j = (2 j + 1) / (2 (n_samples + 1)),   j = 0 ... n_samples - 1

    counts: (B,), patches of each image that are no padding.
    """
    cumulative = (weights / (weights.sum(dim=1, keepdim=True) + 1e-6)).cumsum(dim=1)
    if counts is not None:
        padding = torch.arange(weights.shape[1], device=weights.device) >= counts.unsqueeze(1)
        cumulative = cumulative.masked_fill(padding, torch.inf)
    points = (2 * torch.arange(n_samples, device=weights.device) + 1) / (2 * (n_samples + 1))
    nearest = (points[:, None] - cumulative.unsqueeze(1)).abs().argmin(dim=-1)  # (B, n_samples)
    return torch.zeros_like(weights, dtype=torch.bool).scatter(1, nearest, True)


@register
class EvoViT(Method):
    """The patches that the class token attended to most so far are processed for a stage, the others pass it by.

    What is remembered of a patch is the class token's attention to it, summed over heads: that of the block before the
    first stage, then a running mean over the blocks that process it. A keep rate is of all patches, at every stage: at
    blocks 4 to 7 and 8 to 11 of 12, unless blocks are given. The paper also moves the tokens that pass by along with a
    representative one; the released DeiT code does not, nor does this.

    momentum: how much of the mean is the latest block's.
    per_block: choose anew before every block, as the detectors do, and not once per stage.
    """

    name: ClassVar[str] = "evovit"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    remembers: ClassVar[bool] = True
    kind: ClassVar[Kind] = "skips"
    reference: ClassVar[str] = "Xu et al., Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer, AAAI 2022"

    def __init__(self, momentum: float = 0.5, per_block: bool = False) -> None:
        self.momentum = number("momentum", momentum, above=0, maximum=1)
        self.per_block = flag("per_block", per_block)
        self.tokens_return = "after_block" if per_block else "after_stage"  # type: ignore[misc]

    def schedule(self, keep_rate: Rates, blocks: Sequence[int] | None) -> Schedule:
        return Stages(keep_rate, blocks, returning=True)

    def remember(self, class_attention: Tensor, memory: Tensor | None) -> Tensor:
        latest = class_attention.sum(dim=1)
        return latest if memory is None else (1 - self.momentum) * memory + self.momentum * latest

    def reduce(self, view: View) -> Outcome:
        assert view.memory is not None
        return Outcome(view.keep_best(view.memory[:, view.prefix :]))
