"""DPC-KNN (Zeng et al., TCFormer, CVPR 2022): dense tokens far from denser ones are centres, the others join them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from agglo.checks import choice, number
from agglo.clustering.centres import density_peaks, euclidean_distances
from agglo.grouping import Grouping
from agglo.methods.base import LearnedMethod, ModelShape, Outcome, View, refuse_onnx
from agglo.methods.registry import register
from agglo.methods.soft import linear

WEIGHTS = ("learned", "equal")


@register
class DPCKNN(LearnedMethod):
    """Clusters the tokens around density peaks and takes a mean of every cluster, weighted by a learned score.

    weights: of the members in a cluster's mean: "learned", softmax of a linear score of each token, or "equal", which
        has nothing to learn.
    neighbours: the nearest tokens, itself included, that a token's density is measured by.
    """

    name: ClassVar[str] = "dpc_knn"
    place = "before_block"
    proportional: bool = False
    reference: ClassVar[str] = "Zeng et al., Not All Tokens Are Equal: Token Clustering Transformer, CVPR 2022"

    def __init__(self, weights: str = "learned", neighbours: int = 5) -> None:
        super().__init__()
        self.weights = choice("weights", weights, WEIGHTS)
        self.neighbours = number("neighbours", neighbours, whole=True, minimum=1)
        self.scorers = nn.ModuleList()

    def build(self, shape: ModelShape) -> None:
        if self.weights == "learned":
            # No bias: it would cancel within every cluster.
            self.scorers = nn.ModuleList(linear(shape.width, 1, bias=False) for _ in shape.stages)

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        refuse_onnx("clustering around density peaks")
        squares = euclidean_distances(view.patches, squared=True)
        _, labels = density_peaks(squares, view.target, self.neighbours, width=view.patches.shape[-1])
        grouping = view.group(labels)
        scores = torch.zeros_like(grouping.labels, dtype=torch.float32)
        if self.weights == "learned":
            scores = self.scorers[view.stage](view.tokens).squeeze(-1).float()
        weights = softmax_within(scores, grouping.labels, grouping.n_groups)
        means = Grouping(grouping.labels, torch.ones_like(grouping.sizes), view.prefix, weights)
        return Outcome(grouping, means.merge(view.tokens))


def softmax_within(scores: Tensor, labels: Tensor, n_groups: int) -> Tensor:
    """Return weights (B, T): the softmax of scores (B, T) over the members of every group of labels (B, T)."""
    lowest = scores.new_full((len(scores), n_groups), -torch.inf)
    top = lowest.scatter_reduce(1, labels, scores.detach(), "amax")
    exponentials = (scores - top.gather(1, labels)).exp()
    sums = torch.zeros_like(top).scatter_add(1, labels, exponentials)
    return exponentials / sums.gather(1, labels)
