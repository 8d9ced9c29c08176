"""Which candidate boxes stand for which object, and the random sample of them that a loss sees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

from agglo.detection.model.settings import Assignment

BACKGROUND, NEITHER = -1, -2
_PAIRS_AT_ONCE = 2**23  # a thousand objects against all anchors of a large image would take gigabytes


class Sample(NamedTuple):
    """Indices of the candidates of one image that a loss sees, and the object of each positive one."""

    positive: Tensor
    negative: Tensor
    objects: Tensor


def match(candidates: Tensor, objects: Tensor, rules: Assignment) -> Tensor:
    """(n,) int64: the object that each candidate box (n, 4) stands for among (m, 4), or BACKGROUND, or NEITHER.

    The best candidates of an object, all that tie included, come last and overwrite: a later object wins.
    """
    n = len(candidates)
    best_iou = candidates.new_zeros(n)
    best_object = torch.zeros(n, dtype=torch.int64, device=candidates.device)
    claimed_by = torch.full_like(best_object, BACKGROUND)
    at_once = max(_PAIRS_AT_ONCE // max(n, 1), 1)
    for start in range(0, len(objects) if n else 0, at_once):
        iou = box_iou(objects[start : start + at_once], candidates)
        number = torch.arange(start, start + len(iou), device=iou.device)
        iou_here, object_here = iou.max(dim=0)
        better = iou_here > best_iou
        best_iou = torch.where(better, iou_here, best_iou)
        best_object = torch.where(better, object_here + start, best_object)
        of_object = iou.amax(dim=1, keepdim=True)
        claims = (iou == of_object) & (of_object >= rules.minimum)
        claimed_by = torch.maximum(claimed_by, torch.where(claims, number[:, None], BACKGROUND).amax(dim=0))
    matched = torch.full_like(best_object, NEITHER)
    matched[best_iou < rules.negative] = BACKGROUND
    if len(objects):
        matched = torch.where(best_iou >= rules.positive, best_object, matched)
    return torch.where(claimed_by >= 0, claimed_by, matched)


def sample(matched: Tensor, rules: Assignment) -> Sample:
    """A random sample of matched candidates (n,): positives up to their share, and negatives for the rest."""
    positive = _draw((matched >= 0).nonzero()[:, 0], rules.most_positive)
    negative = _draw((matched == BACKGROUND).nonzero()[:, 0], rules.samples - len(positive))
    return Sample(positive, negative, matched[positive])


def _draw(indices: Tensor, at_most: int) -> Tensor:
    if len(indices) <= at_most:
        return indices
    # Drawn by the CPU's generator whatever the device: a run gives the same sample everywhere.
    chosen = torch.randperm(len(indices))[:at_most].sort().values
    return indices[chosen.to(indices.device)]
