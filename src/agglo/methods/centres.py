"""Clustering around centres: K-Medoids (Token Pooling, WACV 2023) and DPC-KNN (TCFormer, CVPR 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from agglo.checks import choice, flag, number
from agglo.clustering.centres import density_peaks, euclidean_distances, farthest_points, k_medoids
from agglo.grouping import Grouping
from agglo.methods.base import LearnedMethod, Method, ModelShape, Outcome, Place, View, refuse_onnx
from agglo.methods.registry import register
from agglo.methods.soft import linear


@register
class KMedoids(Method):
    """Clusters the tokens by Euclidean distance around medoids, which stay as they are and stand for their cluster.

    weights: how much each token pulls the medoid of its cluster: "attention", as much as the block before attended to
        it (the most attended tokens are the first medoids), or "equal" (the first medoids are far apart).
    iterations: how often tokens are assigned and medoids chosen anew.
    released: as the study's code does: a medoid is the member with the least w_i sum_j d_ij over all
        tokens j, not the least sum_j w_j d_ij over its cluster; with equal weights the first medoid is random and the
        next ones far from any, not from all, before them.
    """

    name: ClassVar[str] = "kmedoids"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    reference: ClassVar[str] = "Marin et al., Token Pooling in Vision Transformers for Image Classification, WACV 2023"

    def __init__(self, weights: str = "attention", iterations: int = 3, released: bool = False) -> None:
        self.weights = choice("weights", weights, ("attention", "equal"))
        self.iterations = number("iterations", iterations, whole=True, minimum=0)
        self.released = flag("released", released)
        self.needs_attention_received = weights == "attention"

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        refuse_onnx("clustering around medoids")
        distances = euclidean_distances(view.patches)
        weights = None
        if self.weights == "attention":
            assert view.attention_received is not None
            weights = view.attention_received[:, view.prefix :].detach().float()
            first = weights.argsort(dim=1, descending=True, stable=True)[:, : view.target]
        else:
            first = farthest_points(distances, view.target, self._start(distances), from_all=not self.released)
        medoids, labels = k_medoids(distances, first, weights, self.iterations, over_all=self.released)
        grouping = view.group(labels)
        in_front = torch.arange(view.prefix, device=medoids.device).expand(len(medoids), -1)
        return Outcome(replace(grouping, chosen=torch.cat([in_front, medoids + view.prefix], dim=1)))

    def _start(self, distances: Tensor) -> Tensor:
        if self.released:
            return torch.randint(distances.shape[1], (1,), device=distances.device).expand(len(distances))
        return distances.sum(dim=1).argmin(dim=1)


@register
class DPCKNN(LearnedMethod):
    """Clusters the tokens around density peaks and takes a mean of every cluster, weighted by a learned score.

    weights: of the members in a cluster's mean: "learned", softmax of a linear score of each token, or "equal", which
        has nothing to learn.
    neighbours: the nearest tokens, itself included, that a token's density is measured by.
    """

    name: ClassVar[str] = "dpc_knn"
    place: ClassVar[Place] = "before_block"
    proportional: bool = False
    reference: ClassVar[str] = "Zeng et al., Not All Tokens Are Equal: Token Clustering Transformer, CVPR 2022"

    def __init__(self, weights: str = "learned", neighbours: int = 5) -> None:
        super().__init__()
        self.weights = choice("weights", weights, ("learned", "equal"))
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
