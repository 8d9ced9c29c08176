"""Clusters around chosen tokens in plain torch, for any device: the definitions are in `centres/operators.py`."""

from __future__ import annotations

import torch
from torch import Tensor

_OUT_OF_REACH = 1e30  # times the number of tokens still a float32


def become_euclidean(products: Tensor, squared: bool) -> None:
    norms = products.diagonal(dim1=1, dim2=2).clone()
    products.mul_(-2).add_(norms.unsqueeze(1)).add_(norms.unsqueeze(2)).clamp_(min=0)
    if not squared:
        products.sqrt_()


def nearest(distances: Tensor, centres: Tensor) -> Tensor:
    """Labels (B, N): for every token the nearest of the centres (B, K), the first of equals; a centre is its own."""
    batch, n_centres = centres.shape
    images = torch.arange(batch, device=centres.device).unsqueeze(1)
    labels = distances[images, centres].min(dim=1).indices
    numbers = torch.arange(n_centres, device=centres.device).expand(batch, n_centres)
    return labels.scatter_(1, centres, numbers)


def largest(scores: Tensor, k: int) -> Tensor:
    """Positions (B, k) of the largest scores (B, N), largest first, the first of equals first on every device."""
    return scores.argsort(dim=1, descending=True, stable=True)[:, :k]


def k_medoids(
    distances: Tensor, first: Tensor, weights: Tensor | None, iterations: int, over_all: bool, rounding: float
) -> tuple[Tensor, Tensor]:
    """Medoids (B, K) and labels (B, N)."""
    medoids, k = first.clone(), first.shape[1]
    if over_all:
        costs = distances.sum(dim=1) if weights is None else distances.sum(dim=1) * weights
    else:
        pulls = distances if weights is None else distances * weights.unsqueeze(2)
    for _ in range(iterations):
        labels = nearest(distances, medoids)
        if not over_all:
            costs = _sums_of_clusters(pulls, labels, k).gather(1, labels.unsqueeze(1)).squeeze(1)
        medoids = _cheapest_members(costs, labels, k, rounding)
    return medoids, nearest(distances, medoids)


def _sums_of_clusters(rows: Tensor, labels: Tensor, k: int) -> Tensor:
    """The sum of the rows (B, N, M) of every cluster's members: (B, k, M)."""
    batch, _, width = rows.shape
    clusters = torch.arange(batch, device=labels.device).unsqueeze(1) * k + labels
    sums = rows.new_zeros(batch * k, width).index_add_(0, clusters.flatten(), rows.flatten(0, 1))
    return sums.view(batch, k, width)


def _cheapest_members(costs: Tensor, labels: Tensor, k: int, rounding: float) -> Tensor:
    """Position (B, k) of every cluster's member with the least of costs (B, N), the first of equals."""
    batch, n_tokens = costs.shape
    least = costs.new_full((batch, k), torch.inf).scatter_reduce_(1, labels, costs, "amin")
    is_least = costs <= least.gather(1, labels) * (1 + rounding)
    positions = torch.arange(n_tokens, device=costs.device).where(is_least, n_tokens)
    firsts = positions.new_full((batch, k), n_tokens).scatter_reduce_(1, labels, positions, "amin")
    return firsts.clamp_(max=n_tokens - 1)  # NaN is never least; what is chosen then has no meaning but must exist


def farthest_points(distances: Tensor, k: int, start: Tensor, from_all: bool) -> Tensor:
    """Positions (B, k)."""
    images = torch.arange(len(distances), device=distances.device)
    reach = distances[images, start]
    free = torch.zeros_like(reach).scatter_(1, start.unsqueeze(1), -torch.inf)
    chosen = [start]
    for _ in range(k - 1):  # each depends on all before it
        latest = (reach + free).max(dim=1).indices
        row = distances[images, latest]
        reach = torch.minimum(reach, row) if from_all else torch.maximum(reach, row)
        free.scatter_(1, latest.unsqueeze(1), -torch.inf)
        chosen.append(latest)
    return torch.stack(chosen, dim=1)


def density_peaks(squares: Tensor, k: int, neighbours: int, width: int) -> tuple[Tensor, Tensor]:
    """Centres (B, k) and labels (B, N)."""
    batch, n_tokens, _ = squares.shape
    closest = squares.topk(min(neighbours, n_tokens), dim=1, largest=False, sorted=False).values
    log_density = -closest.mean(dim=1) / width
    positions = torch.arange(n_tokens, device=squares.device).expand(batch, n_tokens)
    order = largest(log_density, n_tokens)
    rank = torch.empty_like(order).scatter_(1, order, positions).float()
    # A penalty that is 0 for denser tokens: cheaper than selecting them.
    penalty = torch.sub(rank.unsqueeze(2) + 0.5, rank.unsqueeze(1)).clamp_(min=0)
    to_denser = torch.add(squares, penalty, alpha=_OUT_OF_REACH, out=penalty).amin(dim=1)
    delta = torch.where(rank == 0, squares.amax(dim=(1, 2)).unsqueeze(1), to_denser).clamp_(min=0)
    centres = largest(log_density + (delta / width).log() / 2, k)
    return centres, nearest(squares, centres)
