"""Agglomerative Token Clustering (Haurum et al., ECCV 2024): merge the two most similar groups until k are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from agglo.clustering import cluster
from agglo.clustering.arguments import LINKAGES
from agglo.clustering.distances import pairwise, weighted
from agglo.grouping import Grouping, Mean, require_mean
from agglo.methods.base import Method, ModelShape, Outcome, View
from agglo.methods.helpers.exporting import refuse_onnx
from agglo.methods.helpers.features import FEATURES, patch_features
from agglo.methods.helpers.importance import IMPORTANCE, MOST_EXPONENT, patch_weights
from agglo.methods.helpers.per_reduction import at_reduction, entries, one_or_each, require_one_per_reduction
from agglo.methods.registry import register

SIZES = ("counted", "ignored")
_FARTHEST = 2.0  # cosine distances end here
_OUT_OF_REACH = 1.5  # times the farthest


@register
class ATC(Method):
    """Exact bottom-up clustering of the patch tokens by cosine distance; any count from N down to 1.

    linkage: how far apart two groups are: "average", "single" or "complete" (mean, least, greatest distance).
    features: what tokens are compared by: "keys", "keys_per_head", "tokens" or "values".
    sizes: "counted", a merged token is the mean of its patches; or "ignored", it is the plain mean of the tokens at
        hand and attention does not know of sizes, as the released code has it without proportional attention.
    importance: which tokens are farther from all others than they look, so that they merge late: those that the "class"
        token attends to, or that "received" attention from all tokens; None for no such thing, as in the paper.
        The distance of two tokens is then d(i, j) max(w_i, w_j), w = (a / mean of a) ** exponent, a the attention to
        each patch token of an image, to all patches of a merged one together. A threshold is for these distances.
    exponent: of importance.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).

    linkage, features and importance may be lists, with an entry for each reduction.
    """

    name: ClassVar[str] = "atc"
    takes_threshold: ClassVar[bool] = True
    reference: ClassVar[str] = "Haurum et al., Agglomerative Token Clustering, ECCV 2024"

    def __init__(
        self,
        linkage: str | Sequence[str] = "average",
        features: str | Sequence[str] = "keys",
        sizes: str = "counted",
        importance: str | Sequence[str | None] | None = None,
        exponent: float = 0.5,
        mean: Mean = "plain",
    ) -> None:
        self.linkage = one_or_each("linkage", linkage, LINKAGES)
        self.features = one_or_each("features", features, FEATURES)
        self.importance = one_or_each("importance", importance, IMPORTANCE)
        if sizes not in SIZES:
            raise ValueError(f"sizes={sizes!r} are not known; accepted: {', '.join(map(repr, SIZES))}")
        if not 0 < exponent <= MOST_EXPONENT:
            raise ValueError(f"exponent={exponent!r} must be above 0 and at most {MOST_EXPONENT}")
        require_mean(mean)
        self.sizes, self.exponent, self.mean = sizes, exponent, mean
        self.proportional = sizes == "counted"
        self.needs_class_attention = "class" in entries(self.importance)
        self.needs_attention_received = "received" in entries(self.importance)

    def check(self, shape: ModelShape) -> None:
        super().check(shape)
        require_one_per_reduction(self, shape)
        if shape.acts == "before block" and 0 in shape.blocks and entries(self.importance)[0] is not None:
            raise ValueError(
                f"importance={self.importance!r} asks for the attention of the block before, and there is none before "
                "block 0: begin at block 1, or act after attention"
            )

    def compared(self, view: View) -> tuple[Tensor, str, Tensor | None]:
        """What `cluster` and `linkage` are given at a block: features (B, N, D), the linkage, and weights (B, N) if
        tokens have any."""
        linkage = at_reduction("linkage", self.linkage, view.stage)
        features = patch_features(view, at_reduction("features", self.features, view.stage))
        importance = at_reduction("importance", self.importance, view.stage)
        weights = None if importance is None else patch_weights(view, importance, self.exponent)
        return features, linkage, weights

    def reduce(self, view: View) -> Outcome:
        refuse_onnx("agglomerative clustering")
        # Unchecked: NaN in a model means NaN out of it, as without reduction, and a loss scaler skips such a step. The
        # labels are then without meaning, but must be labels.
        features, linkage, weights = self.compared(view)
        if view.target is not None:
            labels = cluster(features, view.target, linkage, weights=weights, check=False)
            labels = labels.clamp(max=view.target - 1)
            return self._outcome(view, Grouping.of(labels, view.target, view.prefix, view.sizes))
        assert view.threshold is not None
        if view.counts is None:
            labels, counts = cluster(features, linkage=linkage, threshold=view.threshold, weights=weights, check=False)
        else:
            labels, counts = _without_padding(features, weights, view.counts, linkage, view.threshold)
        # The batch is as wide as its widest image; the others end in groups of size 0.
        widest = int(counts.max())
        return self._outcome(view, Grouping.of(labels.clamp(max=widest - 1), widest, view.prefix, view.sizes, counts))

    def _outcome(self, view: View, grouping: Grouping) -> Outcome:
        """The groups stand for as many patches as they do, whatever their tokens become."""
        if self.sizes == "counted" or view.sizes is None:
            return Outcome(grouping, mean=self.mean)
        one_each = (view.sizes > 0).float()  # padding counts for nothing
        plain = Grouping.of(
            grouping.labels[:, view.prefix :] - view.prefix, grouping.n_groups - view.prefix, view.prefix, one_each
        )
        return Outcome(grouping, plain.merge(view.tokens, self.mean))


def _without_padding(
    features: Tensor, weights: Tensor | None, n_real: Tensor, linkage: str, threshold: float
) -> tuple[Tensor, Tensor]:
    """Labels (B, N) and counts (B,) after all merges up to a threshold; padding, always last, joins nobody.

    n_real: (B,), tokens of each image that are no padding.
    """
    n_tokens = features.shape[1]
    padding = torch.arange(n_tokens, device=features.device) >= n_real.unsqueeze(1)
    anything = torch.zeros_like(features)
    anything[..., 0] = 1
    distances = pairwise(torch.where(padding.unsqueeze(-1), anything, features), "cosine")
    distances = distances if weights is None else weighted(distances, weights)
    farthest = _FARTHEST if weights is None else _FARTHEST * n_tokens**MOST_EXPONENT
    apart = padding.unsqueeze(1) | padding.unsqueeze(2)
    distances = distances.masked_fill(apart, _OUT_OF_REACH * farthest)
    threshold = min(threshold, farthest)
    labels, with_padding = cluster(distances=distances, linkage=linkage, threshold=threshold, check=False)
    return labels, with_padding - padding.sum(dim=1)
