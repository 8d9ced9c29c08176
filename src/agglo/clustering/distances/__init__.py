"""Token features to float32 distances, whatever the dtype and whether or not autocast is on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agglo.clustering import gpu


def pairwise(features: Tensor, metric: str) -> Tensor:
    """Return the distances (B, N, N), float32, between the tokens of features, as `matrices` takes them."""
    upper = matrices(features, metric, None).triu_(1)
    return upper + upper.transpose(1, 2)


def mean_over_heads(features: Tensor) -> Tensor:
    """Return float32 features (B, N, D), averaged over heads if there are (B, H, N, D)."""
    features = features.detach()
    if features.dim() == 3:
        return features.to(torch.float32)
    if gpu.takes(features) and not torch.compiler.is_compiling():
        return gpu.attempt(lambda: _kernels().head_means(features), partial(_head_means, features))
    return _head_means(features)


def _kernels() -> Any:
    from agglo.clustering.distances import triton  # which need not be installed

    return triton


def _head_means(x: Tensor) -> Tensor:
    # Head by head takes half the time of mean(dim=1), which strides through memory.
    first, *others = x.float().unbind(dim=1)
    total = first.clone()
    for head in others:
        total += head
    return total.div_(x.shape[1])


def _cosine(features: Tensor) -> Tensor:
    unit = unit_rows(features)
    # Products of float32 on CUDA may be those of TF32, by a switch of the whole process; those of float64 are not.
    unit = unit.double() if unit.is_cuda else unit
    product = torch.bmm(unit, unit.transpose(1, 2))
    # Written over the product, so that one matrix is alive and not two.
    return torch.sub(1.0, product, out=product).clamp_(min=0.0).float()


def _cosine_on_gpu(features: Tensor, weights: Tensor | None) -> Tensor:
    def by_torch() -> Tensor:
        return _cosine(features) if weights is None else weighted(_cosine(features), weights)

    return gpu.attempt(lambda: _kernels().distances(features, weights), by_torch)


def weighted(distances: Tensor, weights: Tensor) -> Tensor:
    """Multiply float32 distances (B, N, N) by the larger one of the weights (B, N) of their two tokens."""
    return torch.maximum(weights.unsqueeze(2), weights.unsqueeze(1)).mul_(distances)


def matrices(data: Tensor, metric: str, weights: Tensor | None) -> Tensor:
    """Return contiguous float32 distances (B, N, N), of which the upper triangles count, weighted by (B, N) if given.

    Half precision would round distinct distances to ties and change the tree, so autocast is switched off.

    Args:
        data: Features (B, N, D), or (B, H, N, D) to be averaged over heads, or distances (B, N, N) where the metric is
            "precomputed".
        metric: "cosine", "euclidean" or "precomputed".
        weights: By the larger one of which the distance of two tokens is multiplied.
    """
    if on_cpu := cosine_on_cpu(data, metric, weights):
        return on_cpu.matrices()
    if metric == "precomputed":
        distances = data.to(torch.float32).contiguous()
    else:
        with torch.autocast(data.device.type, enabled=False):
            features = mean_over_heads(data)
            if metric == "cosine" and gpu.takes(features):
                return _cosine_on_gpu(features, weights)
            if metric == "euclidean":
                # The matrix-product formulation loses close neighbours to cancellation: the pairs that merge first.
                distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
            else:
                distances = _cosine(features)
    return distances if weights is None else weighted(distances, weights)


def cosine_on_cpu(data: Tensor, metric: str, weights: Tensor | None) -> Any:
    """Return the `CosineDistances` of features that the CPU's kernels take, or None."""
    if metric != "cosine" or data.device.type != "cpu":
        return None
    from agglo.clustering.distances.cpu import CosineDistances  # compiled kernels load when they are needed

    heads = data if data.dim() == 4 else data.unsqueeze(1)
    return CosineDistances(heads.to(torch.float32), weights)


def unit_rows(features: Tensor) -> Tensor:
    """Scale every token to length 1."""
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
            rows = mean_over_heads(data)
            if metric == "cosine":
                rows = unit_rows(rows)
                lengths = (1 - (rows[:, first] * rows[:, second]).sum(-1)).clamp_(min=0.0)
            else:
                lengths = torch.linalg.vector_norm(rows[:, first] - rows[:, second], dim=-1)
    return lengths if weights is None else lengths * torch.maximum(weights[:, first], weights[:, second])
