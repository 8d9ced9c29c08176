"""DiffRate (Chen et al., ICCV 2023): the patches that matter least are dropped, and the next ones merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import choice, number, whole_numbers
from agglo.grouping import Grouping
from agglo.methods.base import FEATURES, LearnedMethod, Method, ModelShape, Outcome, Varies, View
from agglo.methods.registry import register
from agglo.schedule import PerBlock


@register
class DiffRate(Method):
    """Patches that the class token attends to least are dropped, and the next ones join the most similar of the rest.

    Its authors learned how many of each, block by block: `published` has what they found.

    pruned: how many of the tokens that go are dropped: a fraction, or a number for each block of the model.
    features: what tokens are compared by, as in ATC.
    """

    name: ClassVar[str] = "diffrate"
    needs_class_attention: bool = True
    reference: ClassVar[str] = (
        "Chen et al., DiffRate: Differentiable Compression Rate for Efficient Vision Transformers, ICCV 2023"
    )

    def __init__(self, pruned: float | Sequence[int] = 0.5, features: str = "tokens") -> None:
        self.pruned: float | tuple[int, ...]
        if isinstance(pruned, Sequence):
            self.pruned = whole_numbers("pruned", pruned)
        else:
            self.pruned = number("pruned", pruned, minimum=0, maximum=1)
        self.features = choice("features", features, FEATURES)

    def n_pruned(self, view: View) -> int:
        """Return how many patches are dropped in this block."""
        assert view.target is not None
        n_gone = int(view.patches.shape[1]) - view.target
        if not isinstance(self.pruned, tuple):
            return int(self.pruned * n_gone)
        return min(n_gone, self.pruned[view.block]) if view.block < len(self.pruned) else 0

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        return pruned_and_merged(view, view.target, self.n_pruned(view), self.features)


def pruned_and_merged(view: View, n_kept: int, n_pruned: int, features: str) -> Outcome:
    """Keep the patches that the class token attends to most, drop the last ones, and merge those between."""
    order = view.class_scores.argsort(dim=1, descending=True, stable=True)
    kept = order[:, :n_kept].sort(dim=1).values
    merged = order[:, n_kept : int(order.shape[1]) - n_pruned]
    numbers = torch.arange(n_kept, device=order.device).expand_as(kept)
    labels = torch.full_like(order, -1).scatter(1, kept, numbers)
    labels = labels.scatter(1, merged, most_similar(view.features(features), merged, kept))
    return Outcome(Grouping.of(labels, n_kept, view.prefix, view.sizes, drops=True))


def most_similar(features: Tensor, seekers: Tensor, others: Tensor) -> Tensor:
    """Return for each seeker (B, S) which of the others (B, K) is the most similar by cosine, (B, S) below K."""
    directions = F.normalize(features.float(), dim=-1)
    width = directions.shape[-1]
    ours = directions.gather(1, seekers.unsqueeze(-1).expand(-1, -1, width))
    theirs = directions.gather(1, others.unsqueeze(-1).expand(-1, -1, width))
    with torch.autocast(features.device.type, enabled=False):
        return (ours @ theirs.transpose(1, 2)).argmax(dim=2)


def published(model: str, gflops: float) -> dict[str, Any]:
    """Return the rates that DiffRate's authors publish for a model, as arguments of `agglo.apply(model, "diffrate")`.

    Args:
        model: ViT-T-DeiT, ViT-S-DeiT, ViT-B-DeiT, ViT-B-MAE, ViT-L-MAE or ViT-H-MAE, at 224 pixels.
        gflops: One of the budgets that they give rates for.

    >>> rates = agglo.methods.diffrate.published("ViT-T-DeiT", 0.6)
    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), "diffrate", **rates)
    >>> agglo.report(model).counts
    [196, 186, 166, 138, 113, 89, 75, 65, 56, 44, 36, 2]
    """
    known = json.loads(Path(__file__).with_suffix(".json").read_text())
    budgets = known[choice("model", model, known)]
    after = budgets[choice("gflops", f"{gflops:.1f}", budgets)]
    # Tokens with the class token. Now and then the tables ask for more tokens than are left, which changes nothing.
    left = after["pruned"][0]
    pruned, removed = [], []
    for after_pruning, after_merging in zip(after["pruned"], after["merged"], strict=True):
        after_pruning = min(left, after_pruning)
        after_merging = min(after_pruning, after_merging)
        pruned.append(left - after_pruning)
        removed.append(left - after_merging)
        left = after_merging
    return {"schedule": PerBlock(removed), "pruned": tuple(pruned)}


@register
class LearnedDiffRate(LearnedMethod):
    """DiffRate that learns by gradient how many patches to drop and to merge in each block.

    Each block has two softmaxes over how many patches stay, after dropping and after merging; they begin at the
    schedule, with half of what goes dropped. In training every patch stays behind a mask: it is 1 for as many of the
    most attended patches as are expected to stay, and a patch of rank i has the gradient of the probability that more
    than i stay. The loss is the squared difference of the blocks' multiply-adds to those of the schedule, as a fraction
    of these. Inference keeps the expected counts, and `rates` gives them to "diffrate".

    features: what tokens are compared by, as in ATC.
    loss_weight: of that loss.
    """

    name: ClassVar[str] = "diffrate_learned"
    needs_class_attention: bool = True
    varies: ClassVar[Varies] = "about"
    reach: ClassVar[str] = "any keep rate, as what training aims at the cost of"
    reference: ClassVar[str] = DiffRate.reference

    def __init__(self, features: str = "tokens", loss_weight: float = 5.0) -> None:
        super().__init__()
        self.features = choice("features", features, FEATURES)
        self.loss_weight = number("loss_weight", loss_weight, minimum=0)

    def build(self, shape: ModelShape) -> None:
        self.shape = shape
        n_patches = shape.stages[0][0]
        centres = torch.tensor([[(before + after) / 2, after] for before, after in shape.stages])
        steps = (torch.arange(1, n_patches + 1) - centres.unsqueeze(2)) / (0.05 * n_patches)
        self.logits = nn.Parameter(-steps.square() / 2)  # (stages, 2, N): that 1, ..., N patches stay

    def probabilities(self) -> Tensor:
        """Return how likely the patch of each rank stays after dropping and after merging, (stages, 2, N)."""
        return self.logits.float().softmax(dim=2).flip(2).cumsum(dim=2).flip(2)

    def expected(self) -> Tensor:
        """Return how many patches are expected to stay, (stages, 2), never more than before."""
        counts = self.probabilities().sum(dim=2)
        return counts.flatten().cummin(dim=0).values.view_as(counts)

    def counts(self, n_tokens: int) -> list[list[int]]:
        """Return how many of n_tokens stay in all, after dropping and after merging, for each stage."""
        share = n_tokens / self.logits.shape[2]
        return [[max(1, round(count * share)) for count in stage] for stage in self.expected().tolist()]

    def rates(self) -> dict[str, Any]:
        """Return what was learned as arguments of `agglo.apply(model, "diffrate")`, as `published` does."""
        left, n_blocks = self.shape.stages[0][0], 1 + max(self.shape.blocks)
        pruned, removed = [0] * n_blocks, [0] * n_blocks
        for block, (after_pruning, after_merging) in zip(self.shape.blocks, self.counts(left), strict=True):
            pruned[block], removed[block] = left - after_pruning, left - after_merging
            left = after_merging
        return {"schedule": PerBlock(removed), "pruned": tuple(pruned)}

    def reduce(self, view: View) -> Outcome:
        n_here = int(view.patches.shape[1])
        n_tokens = (view.tokens_before or (n_here,))[0]
        after_pruning, after_merging = (min(n_here, count) for count in self.counts(n_tokens)[view.stage])
        if not view.training:
            return pruned_and_merged(view, after_merging, n_here - after_pruning, self.features)
        sizes = torch.ones_like(view.class_scores) if view.sizes is None else view.sizes[:, view.prefix :]
        alive = torch.ones_like(sizes) if view.policy is None else view.policy[:, view.prefix :] / sizes
        scores = view.class_scores.masked_fill(alive < 0.5, -1)
        ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        soft = self.probabilities()[view.stage][:, ranks * self.logits.shape[2] // n_tokens]  # (2, B, N)
        hard = torch.stack([ranks < after_pruning, ranks < after_merging]).float()
        masks = hard + soft - soft.detach()
        after_dropping = alive * masks[0]
        stays = after_dropping * masks[1]
        return self._masked(view, sizes, after_dropping - stays, stays)

    def _masked(self, view: View, sizes: Tensor, merges: Tensor, stays: Tensor) -> Outcome:
        """Return all tokens, of which some merge into others that stay, by masks (B, N) with gradients."""
        directions = F.normalize(view.features(self.features).float(), dim=-1)
        with torch.autocast(directions.device.type, enabled=False):
            similarity = directions @ directions.transpose(1, 2)
        partner = similarity.masked_fill(stays.unsqueeze(1) < 0.5, -torch.inf).argmax(dim=2)
        moved, x = merges * sizes, view.patches.float()
        gained = torch.zeros_like(sizes).scatter_add(1, partner, moved)
        index = partner.unsqueeze(2).expand_as(x)
        sums = x * sizes.unsqueeze(2)
        sums = sums.scatter_add(1, index, x * moved.unsqueeze(2))
        x = (sums / (sizes + gained).unsqueeze(2)).to(view.tokens.dtype)
        sizes = (sizes + gained).detach()
        front = (view.prefix, 0)
        grouping = replace(Grouping.identity(view.tokens, view.prefix), sizes=F.pad(sizes, front, value=1.0))
        is_last = view.stage == len(self.shape.stages) - 1
        return Outcome(
            grouping,
            torch.cat([view.tokens[:, : view.prefix], x], dim=1),
            loss=self._cost_loss(view.depth) if is_last else None,
            policy=F.pad(stays * sizes, front, value=1.0),
        )

    def _cost_loss(self, depth: int) -> Tensor:
        asked = self._multiply_adds([float(after) for _, after in self.shape.stages], depth)
        return self.loss_weight * (self._multiply_adds(list(self.expected()[:, 1]), depth) / asked - 1).square()

    def _multiply_adds(self, left: Sequence[Any], depth: int) -> Any:
        """Return those of all blocks, with so many patches left after each reduction."""
        n, width, total = self.shape.stages[0][0], self.shape.width, 0.0
        for block in range(depth):
            total = total + 4 * n * width**2 + 2 * n * n * width
            n = left[self.shape.blocks.index(block)] if block in self.shape.blocks else n
            total = total + 8 * n * width**2
        return total
