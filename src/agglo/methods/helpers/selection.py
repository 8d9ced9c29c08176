"""What pruning methods share: keep the patches that score best."""

from __future__ import annotations

import torch
from torch import Tensor

from agglo.grouping import Grouping
from agglo.methods.base import View
from agglo.methods.helpers.exporting import refuse_onnx


def keep_best(view: View, scores: Tensor, n_kept: int) -> Grouping:
    """The n_kept patches with the highest scores (B, N) stay, in the order they have; the others are dropped."""
    return Grouping.select(best(scores, n_kept), scores.shape[1], view.prefix, view.sizes)


def best(scores: Tensor, n_kept: int) -> Tensor:
    """Positions (B, n_kept) of the highest scores (B, N), ascending."""
    return scores.topk(n_kept, dim=1).indices.sort(dim=1).values


def chosen_first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, K) of the chosen (B, N) bool of each image, ascending, and how many (B,) they are.

    K is the most of any image, at least 1; what comes after an image's own only pads.
    """
    refuse_onnx("counts that differ from image to image")
    counts = chosen.sum(dim=1)
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    return order[:, : max(1, int(counts.max()))], counts


def class_scores(view: View) -> Tensor:
    """How much the class token attends to each patch, averaged over heads: (B, N)."""
    assert view.class_attention is not None
    return view.class_attention.mean(dim=1)[:, view.prefix :]
