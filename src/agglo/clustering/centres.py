"""Clusters around chosen tokens: K-Medoids, farthest points, density peaks.

An image has k clusters, none of them empty: a centre belongs to itself, even where another one lies on the same spot.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING = 1e-4  # relative: costs nearer than this are equal, as those of two tokens on their own are by symmetry
_OUT_OF_REACH = 1e30  # times the number of tokens still a float32


def euclidean_distances(tokens: Tensor, *, squared: bool = False) -> Tensor:
    """Return the float32 Euclidean distances (B, N, N) between tokens (B, N, C), or their squares, without gradient.

    |x|^2 + |y|^2 - 2xy of the centred tokens, many times as fast as differences. The diagonal is exactly 0.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        tokens = tokens.detach().float()
        centred = tokens - tokens.mean(dim=1, keepdim=True)
        products = torch.bmm(centred, centred.transpose(1, 2))
    norms = products.diagonal(dim1=1, dim2=2)
    squares = (norms.unsqueeze(2) + norms.unsqueeze(1)).sub_(products, alpha=2).clamp_(min=0)
    return squares if squared else squares.sqrt_()


def k_medoids(
    distances: Tensor, first: Tensor, weights: Tensor | None, iterations: int, over_all: bool
) -> tuple[Tensor, Tensor]:
    """Return medoids (B, K) and labels (B, N) after some iterations from the medoids `first` (B, K).

    Distances are (B, N, N), weights (B, N) or None for equal ones. An iteration assigns every token to its nearest
    medoid; then the medoid of cluster c becomes

        the member i of c with the least  sum_{j in c} w_j d_ij,  or with over_all  w_i sum_j d_ij over all j,

    the first of equals, up to rounding in sums over a cluster.
    """
    medoids, k = first.clone(), first.shape[1]
    if over_all:
        costs = distances.sum(dim=1) if weights is None else distances.sum(dim=1) * weights
    else:
        weighted = distances if weights is None else distances * weights.unsqueeze(2)
    for _ in range(iterations):
        labels = _nearest(distances, medoids)
        if not over_all:
            costs = _sums_of_clusters(weighted, labels, k).gather(1, labels.unsqueeze(1)).squeeze(1)
        medoids = _cheapest_members(costs, labels, k, 0.0 if over_all else _ROUNDING)
    return medoids, _nearest(distances, medoids)


def farthest_points(distances: Tensor, k: int, start: Tensor, from_all: bool) -> Tensor:
    """Return positions (B, k) that begin with start (B,) and go on with the token farthest from those before.

    With from_all, by the distance to the nearest of those before; else to the farthest.
    """
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
    """Return centres (B, k), best first, and labels (B, N).

    From the squared distances (B, N, N) of tokens with `width` channels, with d_ij in units of sqrt(width):

        density_i = exp(-mean of d_ij^2 over the nearest j, i itself included)
        delta_i = min d_ij over all denser j; for the densest the greatest distance in the image
        centres: the k tokens with the greatest density_i delta_i; all others join the nearest centre

    Of equals the first counts as denser. Densities are compared by their logarithms, as far tokens' round to 0.
    """
    batch, n_tokens, _ = squares.shape
    closest = squares.topk(min(neighbours, n_tokens), dim=1, largest=False, sorted=False).values
    log_density = -closest.mean(dim=1) / width
    positions = torch.arange(n_tokens, device=squares.device).expand(batch, n_tokens)
    order = _largest(log_density, n_tokens)
    rank = torch.empty_like(order).scatter_(1, order, positions).float()
    # A penalty that is 0 for denser tokens: cheaper than selecting them.
    penalty = torch.sub(rank.unsqueeze(2) + 0.5, rank.unsqueeze(1)).clamp_(min=0)
    to_denser = torch.add(squares, penalty, alpha=_OUT_OF_REACH).amin(dim=1)
    delta = torch.where(rank == 0, squares.amax(dim=(1, 2)).unsqueeze(1), to_denser).clamp_(min=0)
    centres = _largest(log_density + (delta / width).log() / 2, k)
    return centres, _nearest(squares, centres)


def _nearest(distances: Tensor, centres: Tensor) -> Tensor:
    """Labels (B, N): for every token the nearest of the centres (B, K), the first of equals; a centre is its own."""
    batch, n_centres = centres.shape
    images = torch.arange(batch, device=centres.device).unsqueeze(1)
    labels = distances[images, centres].min(dim=1).indices
    numbers = torch.arange(n_centres, device=centres.device).expand(batch, n_centres)
    return labels.scatter_(1, centres, numbers)


def _largest(scores: Tensor, k: int) -> Tensor:
    """Positions (B, k) of the largest scores (B, N), largest first, the first of equals first on every device."""
    return scores.argsort(dim=1, descending=True, stable=True)[:, :k]


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
