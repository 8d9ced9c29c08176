"""Agglomerative Token Clustering (Haurum et al., ECCV 2024): merge the two most similar groups until k are left."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from agglo.clustering import cluster
from agglo.clustering.arguments import LINKAGES
from agglo.clustering.distances import pairwise
from agglo.grouping import Grouping
from agglo.methods.base import Method, Outcome, View
from agglo.methods.helpers.exporting import refuse_onnx
from agglo.methods.helpers.features import patch_features, require_known
from agglo.methods.registry import register

SIZES = ("counted", "ignored")
_OUT_OF_REACH = 3.0  # cosine distances end at 2


@register
class ATC(Method):
    """Exact bottom-up clustering of the patch tokens by cosine distance; any count from N down to 1.

    linkage: how far apart two groups are: "average", "single" or "complete" (mean, least, greatest distance).
    features: what tokens are compared by: "keys", "keys_per_head", "tokens" or "values".
    sizes: "counted", a merged token is the mean of its patches; or "ignored", it is the plain mean of the tokens at
        hand and attention does not know of sizes, as the released code has it without proportional attention.
    """

    name: ClassVar[str] = "atc"
    takes_threshold: ClassVar[bool] = True
    reference: ClassVar[str] = "Haurum et al., Agglomerative Token Clustering, ECCV 2024"

    def __init__(self, linkage: str = "average", features: str = "keys", sizes: str = "counted") -> None:
        if linkage not in LINKAGES:
            raise ValueError(f"linkage={linkage!r} is not known; accepted: {', '.join(map(repr, LINKAGES))}")
        self.linkage = linkage
        self.features = require_known(features)
        if sizes not in SIZES:
            raise ValueError(f"sizes={sizes!r} are not known; accepted: {', '.join(map(repr, SIZES))}")
        self.sizes = sizes
        self.proportional = sizes == "counted"  # type: ignore[misc]

    def reduce(self, view: View) -> Outcome:
        refuse_onnx("agglomerative clustering")
        # Unchecked: NaN in a model means NaN out of it, as without reduction, and a loss scaler skips such a step. The
        # labels are then without meaning, but must be labels.
        features = patch_features(view, self.features)
        if view.target is not None:
            labels = cluster(features, view.target, self.linkage, check=False).clamp(max=view.target - 1)
            return self._outcome(view, Grouping.of(labels, view.target, view.prefix, view.sizes))
        assert view.threshold is not None
        labels, counts = self._within(features, view.counts, view.threshold)
        # The batch is as wide as its widest image; the others end in groups of size 0.
        widest = int(counts.max())
        return self._outcome(view, Grouping.of(labels.clamp(max=widest - 1), widest, view.prefix, view.sizes, counts))

    def _outcome(self, view: View, grouping: Grouping) -> Outcome:
        """The groups stand for as many patches as they do, whatever their tokens become."""
        if self.sizes == "counted" or view.sizes is None:
            return Outcome(grouping)
        one_each = (view.sizes > 0).float()  # padding counts for nothing
        plain = Grouping.of(
            grouping.labels[:, view.prefix :] - view.prefix, grouping.n_groups - view.prefix, view.prefix, one_each
        )
        return Outcome(grouping, plain.merge(view.tokens))

    def _within(self, features: Tensor, counts: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]:
        """Labels (B, N) and counts (B,) after all merges up to a threshold; padding, always last, joins nobody."""
        if counts is None:
            return cluster(features, linkage=self.linkage, threshold=threshold, check=False)
        padding = torch.arange(features.shape[1], device=features.device) >= counts.unsqueeze(1)
        anything = torch.zeros_like(features)
        anything[..., 0] = 1
        distances = pairwise(torch.where(padding.unsqueeze(-1), anything, features), "cosine")
        apart = padding.unsqueeze(1) | padding.unsqueeze(2)
        distances = distances.masked_fill(apart, _OUT_OF_REACH)
        threshold = min(threshold, 2.0)
        labels, with_padding = cluster(distances=distances, linkage=self.linkage, threshold=threshold, check=False)
        return labels, with_padding - padding.sum(dim=1)
