"""Token features to float32 distances, whatever the dtype and whether or not autocast is on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pairwise(features: Tensor, metric: str) -> Tensor:
    """Return the distances (B, N, N), float32, between the tokens of features (B, N, D).

    Half precision would round distinct distances to ties and change the tree, so autocast is switched off.
    """
    with torch.autocast(features.device.type, enabled=False):
        if metric == "euclidean":
            features = features.detach().to(torch.float32)
            # The matrix-product formulation loses close neighbours to cancellation: the very pairs that merge first.
            return torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        unit = unit_rows(features.detach().to(torch.float32))
        product = torch.bmm(unit, unit.transpose(1, 2))
        # Written over the product, so that one matrix is alive and not two.
        return torch.sub(1.0, product, out=product).clamp_(min=0.0)


def weighted(distances: Tensor, weights: Tensor) -> Tensor:
    """Multiply float32 distances (B, N, N) by the larger one of the weights (B, N) of their two tokens."""
    return torch.maximum(weights.unsqueeze(2), weights.unsqueeze(1)).mul_(distances)


def matrices(data: Tensor, metric: str, weights: Tensor | None) -> Tensor:
    """Return contiguous float32 distances (B, N, N), weighted if there are weights (B, N).

    Data are features (B, N, D), or distances (B, N, N) where the metric is "precomputed".
    """
    distances = data.to(torch.float32).contiguous() if metric == "precomputed" else pairwise(data, metric)
    return distances if weights is None else weighted(distances, weights)


def unit_rows(features: Tensor) -> Tensor:
    """Scale every token to length 1; the same numbers for every backend that runs on a device."""
    if features.device.type == "cpu":
        from agglo.clustering.linkage import cpu  # compiled kernels load when they are needed

        return cpu.unit_rows(features)
    # Scaled by the largest entry first, so that squares of tiny or huge features neither vanish nor overflow.
    features = features / features.abs().amax(dim=-1, keepdim=True)
    return features / features.norm(dim=-1, keepdim=True)


def grid_edges(grid: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the first and second token (E,) of every edge to the right and downwards, in the order of (first, second).

    That order numbers the edges.
    """
    height, width = grid
    token = torch.arange(height * width, device=device).view(height, width)
    first = torch.cat([token[:, :-1].flatten(), token[:-1].flatten()])
    second = torch.cat([token[:, 1:].flatten(), token[1:].flatten()])
    order = (first * token.numel() + second).argsort()
    return first[order], second[order]


def edge_distances(data: Tensor, metric: str, grid: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """Return the float32 distances (B, E) of neighbours, from the arguments of `matrices`; no N x N matrix is made."""
    first, second = grid_edges(grid, data.device)
    if metric == "precomputed":
        lengths = data[:, first, second].to(torch.float32)
    else:
        with torch.autocast(data.device.type, enabled=False):
            rows = data.detach().to(torch.float32)
            if metric == "cosine":
                rows = unit_rows(rows)
                lengths = (1 - (rows[:, first] * rows[:, second]).sum(-1)).clamp_(min=0.0)
            else:
                lengths = torch.linalg.vector_norm(rows[:, first] - rows[:, second], dim=-1)
    return lengths if weights is None else lengths * torch.maximum(weights[:, first], weights[:, second])
