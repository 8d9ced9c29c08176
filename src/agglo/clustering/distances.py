"""Token features to float32 distances, whatever the dtype and whether or not autocast is on."""

from __future__ import annotations

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
    return distances * torch.maximum(weights.unsqueeze(2), weights.unsqueeze(1))


def unit_rows(features: Tensor) -> Tensor:
    """Scale every token to length 1; the same numbers for every backend that runs on a device."""
    if features.device.type == "cpu":
        from agglo.clustering.linkage import cpu  # compiled kernels load when they are needed

        return cpu.unit_rows(features)
    # Scaled by the largest entry first, so that squares of tiny or huge features neither vanish nor overflow.
    features = features / features.abs().amax(dim=-1, keepdim=True)
    return features / features.norm(dim=-1, keepdim=True)
