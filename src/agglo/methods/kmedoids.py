"""K-Medoids (Marin et al., Token Pooling, WACV 2023): tokens that stand nearest to all others of their cluster stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import Method, Outcome, View
from agglo.methods.centres import largest, nearest, squared_distances
from agglo.methods.registry import register

WEIGHTS = ("attention", "equal")
_ROUNDING = 1e-4  # relative: costs nearer than this are equal, as those of two tokens on their own are by symmetry


@register
class KMedoids(Method):
    """Clusters the tokens by Euclidean distance around medoids, which stay as they are and stand for their cluster.

    weights: how much each token pulls the medoid of its cluster: "attention", as much as the block before attended to
        it (the most attended tokens are the first medoids), or "equal" (the first medoids are far apart).
    iterations: how often tokens are assigned and medoids chosen anew.
    released: as the code behind the published numbers: a medoid is the member with the least w_i sum_j d_ij over all
        tokens j, not the least sum_j w_j d_ij over its cluster; with equal weights the first medoid is random and the
        next ones far from any, not from all, before them.
    """

    name: ClassVar[str] = "kmedoids"
    acts = "before block"
    proportional: ClassVar[bool] = False
    reference: ClassVar[str] = "Marin et al., Token Pooling in Vision Transformers for Image Classification, WACV 2023"

    def __init__(self, weights: str = "attention", iterations: int = 3, released: bool = False) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights={weights!r} are not known; accepted: {', '.join(map(repr, WEIGHTS))}")
        if iterations < 0:
            raise ValueError(f"iterations={iterations!r} must be 0 or more")
        self.weights, self.iterations, self.released = weights, iterations, released
        self.needs_attention_received = weights == "attention"  # type: ignore[misc]

    def options(self) -> dict[str, Any]:
        return {"weights": self.weights, "iterations": self.iterations, "released": self.released}

    def reduce(self, view: View) -> Outcome:
        assert view.target is not None
        distances = squared_distances(view.patches).clamp_(min=0).sqrt_()
        weights = self._weights(view)
        if weights is not None:
            first = largest(weights, view.target)
        else:
            first = farthest_points(distances, view.target, self._start(distances), from_all=not self.released)
        medoids = k_medoids(distances, first, weights, self.iterations, over_all=self.released)
        grouping = Grouping.of(nearest(distances, medoids), view.target, view.prefix, view.sizes)
        in_front = torch.arange(view.prefix, device=medoids.device).expand(len(medoids), -1)
        return Outcome(replace(grouping, chosen=torch.cat([in_front, medoids + view.prefix], dim=1)))

    def _weights(self, view: View) -> Tensor | None:
        if self.weights == "equal":
            return None
        if view.attention_received is None:
            raise ValueError(
                "kmedoids weighs tokens by the attention of the block before, and block 0 has none: let a later block "
                "reduce first, or give weights='equal'"
            )
        return view.attention_received[:, view.prefix :].detach().float()

    def _start(self, distances: Tensor) -> Tensor:
        batch, n_tokens, _ = distances.shape
        if self.released:
            return torch.randint(n_tokens, (1,), device=distances.device).expand(batch)
        return distances.sum(dim=1).argmin(dim=1)


def farthest_points(distances: Tensor, k: int, start: Tensor, *, from_all: bool = True) -> Tensor:
    """Positions (B, k) that begin with start (B,) and go on with the token farthest from those before.

    from_all: how far is the distance (of distances (B, N, N)) to the nearest of those before; else to the farthest.
    """
    images = torch.arange(len(distances), device=distances.device)
    reach = distances[images, start]
    free = torch.zeros_like(reach).index_put_((images, start), reach.new_tensor(-torch.inf))
    chosen = [start]
    for _ in range(k - 1):  # each depends on all before it
        latest = (reach + free).max(dim=1).indices
        row = distances[images, latest]
        reach = torch.minimum(reach, row) if from_all else torch.maximum(reach, row)
        free.scatter_(1, latest.unsqueeze(1), -torch.inf)
        chosen.append(latest)
    return torch.stack(chosen, dim=1)


def k_medoids(
    distances: Tensor, first: Tensor, weights: Tensor | None, iterations: int, *, over_all: bool = False
) -> Tensor:
    """Medoids (B, K) after some iterations from first (B, K), for distances (B, N, N) and weights (B, N) or None.

    An iteration assigns every token to its nearest medoid; then the medoid of cluster c becomes

        the member i of c with the least  sum_{j in c} w_j d_ij,  or with over_all  w_i sum_j d_ij over all j,

    the first of equals, up to rounding.
    """
    k = first.shape[1]
    medoids = first
    if over_all:
        costs = distances.sum(dim=1) if weights is None else distances.sum(dim=1) * weights
    else:
        pulls = distances if weights is None else distances * weights.unsqueeze(2)
    for _ in range(iterations):
        labels = nearest(distances, medoids)
        if not over_all:
            costs = _sums_of_clusters(pulls, labels, k).gather(1, labels.unsqueeze(1)).squeeze(1)
        medoids = cheapest_members(costs, labels, k)
    return medoids


def _sums_of_clusters(rows: Tensor, labels: Tensor, k: int) -> Tensor:
    """The sum of the rows (B, N, M) of every cluster's members: (B, k, M)."""
    batch, _, width = rows.shape
    clusters = torch.arange(batch, device=labels.device).unsqueeze(1) * k + labels
    sums = rows.new_zeros(batch * k, width).index_add_(0, clusters.flatten(), rows.flatten(0, 1))
    return sums.view(batch, k, width)


def cheapest_members(costs: Tensor, labels: Tensor, k: int) -> Tensor:
    """Position (B, k) of every cluster's member with the least of costs (B, N), the first of equals."""
    batch, n_tokens = costs.shape
    least = costs.new_full((batch, k), torch.inf).scatter_reduce_(1, labels, costs, "amin")
    is_least = costs <= least.gather(1, labels) * (1 + _ROUNDING)
    positions = torch.arange(n_tokens, device=costs.device).where(is_least, n_tokens)
    firsts = positions.new_full((batch, k), n_tokens).scatter_reduce_(1, labels, positions, "amin")
    return firsts.clamp_(max=n_tokens - 1)  # NaN is never least; what is chosen then has no meaning but must exist
