"""DTEM (Lee and Hong, NeurIPS 2024): a small embedding decides what merges, and learns from a soft merging."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agglo.checks import number
from agglo.grouping import Grouping
from agglo.methods.base import LearnedMethod, ModelShape, Outcome, View
from agglo.methods.registry import register
from agglo.methods.soft import linear
from agglo.methods.tome import PairMerging, match

_LEAST = 1e-6  # of a token that has gone: 0 would mean padding


@register
class DTEM(LearnedMethod, PairMerging):
    """Tokens are matched as in ToMe, but by a learned linear embedding of each block, which nothing else uses.

    In training every token stays, and how much of it has gone into others is a number below 1: each token of the first
    half goes to those of the second by softmax(cosine / temperature), and which go at all is a softmax that is repeated
    as often as tokens are to go, less likely for those that went before. What is left of a token weighs in attention.

    width: of the embedding.
    temperature: what cosines are divided by in training; smaller is closer to what inference does.
    """

    name: ClassVar[str] = "dtem"
    reference: ClassVar[str] = (
        "Lee and Hong, Learning to Merge Tokens via Decoupled Embedding for Efficient Vision Transformers, NeurIPS 2024"
    )

    def __init__(self, width: int = 64, temperature: float = 0.1) -> None:
        nn.Module.__init__(self)
        self.width = number("width", width, whole=True, minimum=1)
        self.temperature = number("temperature", temperature, above=0)
        self.counts: tuple[tuple[int, int], ...] = ()
        self.embeddings = nn.ModuleList()

    def build(self, shape: ModelShape) -> None:
        self.counts = shape.stages
        self.embeddings = nn.ModuleList(linear(shape.width, self.width) for _ in shape.stages)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        embedded = F.normalize(self.embeddings[view.stage](view.patches.detach()).float(), dim=-1)
        if view.training:
            return self.relaxed(view, embedded)
        n_merges = int(embedded.shape[1]) - view.target
        return Outcome(view.group(match(embedded, n_merges, view.prefix % 2, view.prefix == 0)[0]))

    def relaxed(self, view: View, embedded: Tensor) -> Outcome:
        """Return all tokens, of which some have gone into others in part."""
        first, prefix = view.prefix % 2, view.prefix
        before, after = self.counts[view.stage]
        n_merges = (before - after) * int(embedded.shape[1]) // self.counts[0][0]
        sizes = torch.ones_like(embedded[..., 0]) if view.sizes is None else view.sizes[:, prefix:]
        there = sizes.clamp(max=1).log()  # what went before neither goes again nor takes others in
        with torch.autocast(embedded.device.type, enabled=False):
            cosines = embedded[:, first::2] @ embedded[:, 1 - first :: 2].transpose(1, 2)
        logits = cosines / self.temperature + there[:, 1 - first :: 2].unsqueeze(1)
        goes = relaxed_top(logits.logsumexp(dim=2) + there[:, first::2], n_merges, self.temperature)
        moved = (goes * sizes[:, first::2]).unsqueeze(2) * logits.softmax(dim=2)  # (B, seekers, stayers)
        gained = moved.sum(dim=1)
        kept = sizes[:, 1 - first :: 2]
        x = view.patches.float()
        sums = x[:, 1 - first :: 2] * kept.unsqueeze(2) + moved.transpose(1, 2) @ x[:, first::2]
        positions = torch.arange(x.shape[1], device=x.device)
        x = x.index_copy(1, positions[1 - first :: 2], sums / (kept + gained).unsqueeze(2))
        change = torch.zeros_like(sizes).index_copy(1, positions[1 - first :: 2], gained)
        change = change.index_copy(1, positions[first::2], -moved.sum(dim=2))
        sizes = F.pad((sizes + change).clamp(min=_LEAST), (prefix, 0), value=1.0)
        grouping = replace(Grouping.identity(view.tokens, prefix), sizes=sizes)
        return Outcome(grouping, torch.cat([view.tokens[:, :prefix], x.to(view.tokens.dtype)], dim=1))


def relaxed_top(scores: Tensor, k: int, temperature: float) -> Tensor:
    """Return how much (B, N) each of the scores (B, N) is among the k largest, in [0, 1].

    The sum of k softmaxes; scores, which are in units of the temperature, lose -log(1 - p) / temperature after each.
    """
    chosen = torch.zeros_like(scores)
    for _ in range(k):
        probabilities = scores.softmax(dim=1)
        chosen = chosen + probabilities
        scores = scores + torch.log1p(-probabilities.clamp(max=1 - _LEAST)) / temperature
    return chosen.clamp(max=1)
