"""The edges between neighbouring tokens of a grid, and their distances."""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.clustering.distances import unit_rows


def neighbours(height: int, width: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the first and second token (E,) of every edge, in the order of (first, second), which numbers the edges.

    Neighbours are left and right, above and below.
    """
    token = torch.arange(height * width, device=device).view(height, width)
    exists = _has_neighbour(height, width, device)
    first = torch.stack([token, token], dim=-1)
    second = torch.stack([token + 1, token + width], dim=-1)
    return first[exists], second[exists]


def _has_neighbour(height: int, width: int, device: torch.device | str) -> Tensor:
    """Whether every token has one to its right, and one below: (H, W, 2)."""
    exists = torch.ones(height, width, 2, dtype=torch.bool, device=device)
    exists[:, -1, 0] = False
    exists[-1, :, 1] = False
    return exists


def edge_distances(data: Tensor, metric: str, height: int, width: int, weights: Tensor | None = None) -> Tensor:
    """Return the float32 distances (B, E) of neighbours, from features (B, N, D) or distances (B, N, N).

    Float32 weights (B, N) multiply each by the larger weight of the two neighbours. There is never an N x N matrix
    besides one that is given.
    """
    lengths = _unweighted(data, metric, height, width)
    if weights is None:
        return lengths
    first, second = neighbours(height, width, data.device)
    return lengths * torch.maximum(weights[:, first], weights[:, second])


def _unweighted(data: Tensor, metric: str, height: int, width: int) -> Tensor:
    if metric == "precomputed":
        first, second = neighbours(height, width, data.device)
        return data[:, first, second].to(torch.float32)
    with torch.autocast(data.device.type, enabled=False):
        rows = data.detach().to(torch.float32)
        rows = (unit_rows(rows) if metric == "cosine" else rows).unflatten(1, (height, width))
        between = rows.new_full((len(data), height, width, 2), 0.0)
        if metric == "cosine":
            between[:, :, :-1, 0] = 1 - (rows[:, :, :-1] * rows[:, :, 1:]).sum(-1)
            between[:, :-1, :, 1] = 1 - (rows[:, :-1] * rows[:, 1:]).sum(-1)
            between.clamp_(min=0.0)
        else:
            between[:, :, :-1, 0] = torch.linalg.vector_norm(rows[:, :, :-1] - rows[:, :, 1:], dim=-1)
            between[:, :-1, :, 1] = torch.linalg.vector_norm(rows[:, :-1] - rows[:, 1:], dim=-1)
    return between[:, _has_neighbour(height, width, data.device)]
