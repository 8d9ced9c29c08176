"""K-Medoids (Marin et al., Token Pooling, WACV 2023): tokens that stand nearest to all others of their cluster stay."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from agglo.checks import choice, flag, number
from agglo.clustering.centres import euclidean_distances, farthest_points, k_medoids
from agglo.methods.base import Method, Outcome, View, refuse_onnx
from agglo.methods.registry import register

WEIGHTS = ("attention", "equal")


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
    place = "before_block"
    proportional: bool = False
    reference: ClassVar[str] = "Marin et al., Token Pooling in Vision Transformers for Image Classification, WACV 2023"

    def __init__(self, weights: str = "attention", iterations: int = 3, released: bool = False) -> None:
        self.weights = choice("weights", weights, WEIGHTS)
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
