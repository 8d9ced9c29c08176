"""The edges between neighbouring tokens of a grid, and their distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agglo.clustering.distances import unit_rows


def neighbours(grid: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
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
    """Return the float32 distances (B, E) of neighbours, from features (B, N, D) or distances (B, N, N).

    Float32 weights (B, N) multiply each by the larger weight of the two neighbours. There is never an N x N matrix
    besides one that is given.
    """
    first, second = neighbours(grid, data.device)
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
