"""Selection of the patches that stay, for pruning methods."""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import View, refuse_onnx


def keep_best(view: View, scores: Tensor, n_kept: int) -> Grouping:
    """Keep the n_kept patches with the highest scores (B, N), in the order they have, and drop the others."""
    return Grouping.select(best(scores, n_kept), scores.shape[1], view.prefix, view.sizes)


def best(scores: Tensor, n_kept: int) -> Tensor:
    """Return the positions (B, n_kept) of the highest scores (B, N), ascending."""
    return scores.topk(n_kept, dim=1).indices.sort(dim=1).values


def chosen_first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions (B, K) of the chosen (B, N) bool of each image, ascending, and their number (B,).

    K is the most of any image, at least 1; what comes after an image's own only pads.
    """
    refuse_onnx("counts that differ from image to image")
    counts = chosen.sum(dim=1)
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    return order[:, : max(1, int(counts.max()))], counts


def class_scores(view: View) -> Tensor:
    """Return the class token's attention to each patch, averaged over heads: (B, N)."""
    assert view.class_attention is not None
    return view.class_attention.mean(dim=1)[:, view.prefix :]
