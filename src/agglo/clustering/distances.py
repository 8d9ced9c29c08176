"""Token features to float32 distances, whatever the dtype and whether or not autocast is on."""

from __future__ import annotations

import torch
from torch import Tensor

METRICS = ("cosine", "euclidean")


def pairwise(features: Tensor, metric: str) -> Tensor:
    """Distances (B, N, N) in float32 between the tokens of features (B, N, D).

    Half precision would round distinct distances to ties and change the tree, so autocast is switched
    off around the product.
    """
    with torch.autocast(features.device.type, enabled=False):
        features = features.detach().to(torch.float32)
        if metric == "euclidean":
            # The matrix-product formulation loses close neighbours to cancellation: the very pairs that merge first.
            return torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        # Scaled by the largest entry first, so that squares of tiny or huge features neither vanish nor overflow.
        features = features / features.abs().amax(dim=-1, keepdim=True)
        unit = features / features.norm(dim=-1, keepdim=True)
        # Written over the product, so that one matrix is alive and not two.
        product = torch.bmm(unit, unit.transpose(1, 2))
        return torch.sub(1.0, product, out=product).clamp_(min=0.0)
