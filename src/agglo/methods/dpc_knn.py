"""DPC-KNN (Zeng et al., TCFormer, CVPR 2022): dense tokens far from denser ones are centres, the others join them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from agglo.grouping import Grouping
from agglo.methods.base import LearnedMethod, Outcome, Setting, View
from agglo.methods.centres import largest, nearest, squared_distances
from agglo.methods.registry import register
from agglo.methods.soft import linear

WEIGHTS = ("learned", "equal")
_OUT_OF_REACH = 1e30  # times the number of tokens still a float32


@register
class DPCKNN(LearnedMethod):
    """Clusters the tokens around density peaks and takes a mean of every cluster, weighted by a learned score.

    weights: of the members in a cluster's mean: "learned", softmax of a linear score of each token, or "equal", which
        has nothing to learn.
    neighbours: the nearest tokens, itself included, that a token's density is measured by.
    """

    name: ClassVar[str] = "dpc_knn"
    acts = "before block"
    proportional: ClassVar[bool] = False
    reference: ClassVar[str] = "Zeng et al., Not All Tokens Are Equal: Token Clustering Transformer, CVPR 2022"

    def __init__(self, weights: str = "learned", neighbours: int = 5) -> None:
        super().__init__()
        if weights not in WEIGHTS:
            raise ValueError(f"weights={weights!r} are not known; accepted: {', '.join(map(repr, WEIGHTS))}")
        if neighbours < 1:
            raise ValueError(f"neighbours={neighbours!r} must be 1 or more: a token is its own first neighbour")
        self.weights, self.neighbours = weights, neighbours
        self.scorers = nn.ModuleList()

    def options(self) -> dict[str, Any]:
        return {"weights": self.weights, "neighbours": self.neighbours}

    def build(self, setting: Setting) -> None:
        if self.weights == "learned":
            # No bias: it would cancel within every cluster.
            self.scorers = nn.ModuleList(linear(setting.width, 1, bias=False) for _ in setting.stages)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        _, labels = dpc_knn(view.patches, view.target, self.neighbours)
        grouping = Grouping.of(labels, view.target, view.prefix, view.sizes)
        if self.weights == "learned":
            scores = self.scorers[view.stage](view.tokens).squeeze(-1).float()
        else:
            scores = torch.zeros_like(grouping.labels, dtype=torch.float32)
        weights = softmax_within(scores, grouping.labels, grouping.n_groups)
        means = Grouping(grouping.labels, torch.ones_like(grouping.sizes), view.prefix, weights)
        return Outcome(grouping, means.merge(view.tokens))


def dpc_knn(tokens: Tensor, k: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Centres (B, k), best first, and labels (B, N) of tokens (B, N, C), without gradient. With d_ij in sqrt(C):

        density_i = exp(-mean of d_ij^2 over the nearest j, i itself included)
        delta_i = min d_ij over all denser j; for the densest the greatest distance in the image
        centres: the k tokens with the greatest density_i delta_i; all others join the nearest centre

    Of equals the first counts as denser, where the released code adds noise. Densities are compared by their
    logarithms, which far tokens do not round to 0.
    """
    batch, n_tokens, width = tokens.shape
    squares = squared_distances(tokens)
    closest = smallest(squares, min(neighbours, n_tokens))
    log_density = -closest.mean(dim=1) / width
    positions = torch.arange(n_tokens, device=tokens.device).expand(batch, n_tokens)
    order = largest(log_density, n_tokens)
    rank = torch.empty_like(order).scatter_(1, order, positions).float()
    # A penalty that is 0 for denser tokens: twice as fast as selecting them.
    penalty = torch.sub(rank.unsqueeze(2) + 0.5, rank.unsqueeze(1)).clamp_(min=0)
    to_denser = torch.add(squares, penalty, alpha=_OUT_OF_REACH, out=penalty).amin(dim=1)
    delta = torch.where(rank == 0, squares.amax(dim=(1, 2)).unsqueeze(1), to_denser).clamp_(min=0)
    centres = largest(log_density + (delta / width).log() / 2, k)
    return centres, nearest(squares, centres)


def smallest(x: Tensor, m: int) -> Tensor:
    """The m smallest of x (B, N, M) along dim 1, in any order: (B, m, M)."""
    return _candidates(x, m).topk(m, dim=1, largest=False, sorted=False).values


def _candidates(x: Tensor, m: int) -> Tensor:
    """Few of the values of x (B, N, M) along dim 1, the m smallest among them.

    Values are compared in pairs. Of the m smallest at most m // 2 can have lost, since whoever beat them is one of the
    m smallest too. Elementwise minima and maxima run at the speed of memory, several times as fast as topk.
    """
    if m == 0:
        return x[:, :0]
    if m == 1:
        return x.amin(dim=1, keepdim=True)
    half = x.shape[1] // 2
    if half < m:
        return x
    one, two, odd = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    winners = _candidates(torch.minimum(one, two), m)
    losers = _candidates(torch.maximum(one, two), m // 2)
    return torch.cat([winners, losers, odd], dim=1)


def softmax_within(scores: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """Weights (B, T) that sum to 1 in every group of labels (B, T): softmax of scores (B, T) over its members."""
    batch = len(scores)
    lowest = scores.new_full((batch, n_groups), -torch.inf)
    top = lowest.scatter_reduce(1, labels, scores.detach(), "amax")
    exponentials = (scores - top.gather(1, labels)).exp()
    sums = scores.new_zeros(batch, n_groups).scatter_add(1, labels, exponentials)
    return exponentials / sums.gather(1, labels)
