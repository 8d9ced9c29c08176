"""Agglomerative Token Clustering (Haurum et al., ECCV 2024): merge the two most similar groups until k are left."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from agglo.checks import choice, number
from agglo.clustering import cluster
from agglo.clustering.api import CONNECTIVITIES, LINKAGES, SPREADS, window_sides
from agglo.clustering.distances import mean_over_heads, pairwise, weighted
from agglo.clustering.merge import kernels as merge_kernels
from agglo.compiling import takes_kernels
from agglo.grouping import MEANS, Grouping, Mean
from agglo.methods.base import FEATURES, Method, ModelShape, Outcome, View, refuse_onnx, require_grid
from agglo.methods.registry import register

SIZES = ("counted", "ignored")
IMPORTANCE = (None, "class", "received")
ALL = "all"  # tokens at once
MOST_EXPONENT = 4  # weights are at most N ** exponent, which must stay far from the end of float32
_FARTHEST = 2.0  # cosine distances end here
_OUT_OF_REACH = 1.5  # times the farthest


@register
class ATC(Method):
    """Exact bottom-up clustering of the patch tokens by cosine distance; any count from N down to 1.

    linkage: the distance of two groups: "average", "single" or "complete" (mean, least, greatest distance of members).
    features: what tokens are compared by: "keys", "keys_per_head", "tokens" or "values".
    sizes: "counted", a merged token is the mean of its patches; or "ignored", it is the plain mean of the merged tokens
        and attention does not use sizes, as in the released code without proportional attention.
    importance: which tokens are moved away from all others, so that they merge late: those that the "class" token
        attends to, or that "received" attention from all tokens; None for none, as in the paper.
        The distance of two tokens is then d(i, j) max(w_i, w_j), w = (a / mean of a) ** exponent, a the attention to
        each patch token of an image, to all patches of a merged one together. A threshold is for these distances.
    exponent: of importance.
    mean: "plain", or "preserve_norm": a merged token is as long as its members are on average (`Grouping.merge`).
    window: cluster within windows of the token grid: tokens per side, an int or (rows, columns); "all" clusters all
        tokens at once, whatever their number. None does so too, except in diffusion models, whose grids of more than 16
        rows or columns are clustered in windows of 16 x 16: all tokens at once cost more than attention saves.
    connectivity: "grid" merges neighbouring groups only, in place of a window.
    spread: how groups are divided among windows: "even", or by "need".
    """

    name: ClassVar[str] = "atc"
    takes_threshold: ClassVar[bool] = True
    reference: ClassVar[str] = "Haurum et al., Agglomerative Token Clustering, ECCV 2024"

    def __init__(
        self,
        linkage: str = "average",
        features: str = "keys",
        sizes: str = "counted",
        importance: str | None = None,
        exponent: float = 0.5,
        mean: Mean = "plain",
        window: int | tuple[int, int] | Literal["all"] | None = None,
        connectivity: str | None = None,
        spread: str | None = None,
    ) -> None:
        self.linkage, self.features = choice("linkage", linkage, LINKAGES), choice("features", features, FEATURES)
        self.importance = choice("importance", importance, IMPORTANCE)
        self.sizes, self.mean = choice("sizes", sizes, SIZES), choice("mean", mean, MEANS)
        self.exponent = number("exponent", exponent, above=0, maximum=MOST_EXPONENT)
        self.proportional = sizes == "counted"
        self.needs_class_attention, self.needs_attention_received = importance == "class", importance == "received"
        in_windows = not isinstance(window, str) and window is not None
        if not isinstance(window, str) and window is not None:
            window_sides(window)
        self.window = window if in_windows else choice("window", window, (None, ALL))
        self.connectivity = choice("connectivity", connectivity, (None, *CONNECTIVITIES))
        self.spread = choice("spread", spread, (None, *SPREADS))
        self.reads_grid = in_windows or connectivity is not None
        if in_windows and connectivity is not None:
            raise ValueError(f"window={window!r} and connectivity={connectivity!r}: give one of them")
        if spread is not None and not in_windows:
            raise ValueError(f"spread={spread!r} is about windows: give window= too")
        if self.reads_grid and importance is not None:
            raise ValueError(f"importance={importance!r} does not go with window= and connectivity=")

    def check(self, shape: ModelShape) -> None:
        super().check(shape)
        if self.reads_grid and len(shape.blocks) > 1:
            raise ValueError(
                f"window={self.window!r}, connectivity={self.connectivity!r}: after one reduction tokens make no grid, "
                f"and this schedule reduces at {len(shape.blocks)} blocks"
            )

    def window_in(self, proposed: int | None) -> int | tuple[int, int] | None:
        if isinstance(self.window, str) or self.connectivity is not None:
            return None
        return proposed if self.window is None else self.window

    def compared(self, view: View) -> tuple[Tensor, str, Tensor | None]:
        """Return features, (B, N, D) or (B, H, N, d), the linkage, and any weights (B, N) of a block's tokens."""
        weights = None if self.importance is None else _weights(view, self.importance, self.exponent)
        is_mean = self.features in ("keys", "values")
        features = view.heads(self.features) if is_mean else view.features(self.features)
        return features, self.linkage, weights

    def reduce(self, view: View) -> Outcome:
        refuse_onnx("agglomerative clustering")
        # Unchecked: NaN in a model means NaN out of it, as without reduction, and a loss scaler skips such a step. The
        # labels are then without meaning, but must be labels.
        features, linkage, weights = self.compared(view)
        if view.target is not None:
            given = view.tokens, features, weights, view.sizes
            grid = self._grid(view, int(features.shape[-2]))
            if not grid and self.proportional and takes_kernels(*given):
                return self._at_once(view, features, weights)
            labels = cluster(features, view.target, linkage, weights=weights, check=False, **grid)
            return self._outcome(view, view.group(labels.clamp(max=view.target - 1)))
        if self.reads_grid:
            raise ValueError("a threshold does not go with window= and connectivity=: give keep_rate")
        assert view.threshold is not None
        if view.counts is None:
            labels, counts = cluster(features, linkage=linkage, threshold=view.threshold, weights=weights, check=False)
        else:
            labels, counts = _without_padding(features, weights, view.counts, linkage, view.threshold)
        # The batch is as wide as its widest image; the others end in groups of size 0.
        widest = int(counts.max())
        return self._outcome(view, view.group(labels.clamp(max=widest - 1), counts, n_groups=widest))

    def _grid(self, view: View, n_tokens: int) -> dict[str, Any]:
        """Return the arguments of `agglo.cluster` about the grid; none where all tokens are clustered at once."""
        window = self.window_in(view.window)
        if window is None and self.connectivity is None:
            return {}
        grid, spread = require_grid(self, view.grid, n_tokens), self.spread or "even"
        return {"grid": grid, "window": window, "connectivity": self.connectivity, "spread": spread}

    def _at_once(self, view: View, features: Tensor, weights: Tensor | None) -> Outcome:
        """Cluster and merge by one call of the CPU's kernels; at one image this saves more than clustering takes."""
        assert view.target is not None
        labels, sizes, merged = merge_kernels().cluster_and_merge(
            view.tokens, features, weights, view.target, self.linkage, view.sizes, view.prefix,
            self.mean == "preserve_norm",
        )  # fmt: skip
        return Outcome(Grouping(labels, sizes, view.prefix, view.sizes), merged, mean=self.mean)

    def _outcome(self, view: View, grouping: Grouping) -> Outcome:
        if self.sizes == "counted" or view.sizes is None:
            return Outcome(grouping, mean=self.mean)
        ones = (view.sizes > 0).float()  # padding counts for nothing
        prefix, labels = view.prefix, grouping.labels[:, view.prefix :] - view.prefix
        plain = Grouping.of(labels, grouping.n_groups - prefix, prefix, ones)
        return Outcome(grouping, plain.merge(view.tokens, self.mean))


def _weights(view: View, importance: str, exponent: float) -> Tensor:
    """Return weights (B, N) of the patch tokens: (attention to each / mean attention of the image) ** exponent.

    The attention to a merged token is that to all its patches, which holds large groups back from growing.
    """
    attention = view.class_attention if importance == "class" else view.attention_received
    if attention is None:
        raise ValueError(f"importance={importance!r} needs the attention of a block, and there is none at this place")
    attention = attention.detach().float()
    attention = attention if importance == "class" else attention.unsqueeze(1)
    if view.counts is None and takes_kernels(attention):
        from agglo.attention.cpu import patch_weights  # compiled kernels load when they are needed

        return patch_weights(attention, view.prefix, exponent)
    to_patches = attention.mean(dim=1)[:, view.prefix :]
    n_real: int | Tensor = to_patches.shape[1]
    if view.counts is not None:
        padding = torch.arange(to_patches.shape[1], device=to_patches.device) >= view.counts.unsqueeze(1)
        to_patches = to_patches.masked_fill(padding, 0)
        n_real = view.counts.clamp(min=1).unsqueeze(1)
    mean = to_patches.sum(dim=1, keepdim=True) / n_real
    return (to_patches / mean.clamp(min=torch.finfo(torch.float32).tiny)).pow(exponent)


def _without_padding(
    features: Tensor, weights: Tensor | None, n_real: Tensor, linkage: str, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return labels (B, N) and counts (B,) after all merges up to a threshold, of which padding, always last, has none.

    n_real: (B,), tokens of each image that are no padding.
    """
    features = mean_over_heads(features)
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
