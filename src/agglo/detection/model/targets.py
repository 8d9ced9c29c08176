"""What the detector learns from, checked: a wrong label or an empty box would fail much later, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NEEDED = ("boxes", "labels", "masks")


class Target(NamedTuple):
    """The objects of one image: boxes (n, 4) float32, labels (n,) int64, masks (n, h, w) of 0 and 1."""

    boxes: Tensor
    labels: Tensor
    masks: Tensor


def checked(targets: Sequence[Mapping[str, Any]], images: Sequence[Tensor], n_classes: int) -> list[Target]:
    """The targets of images (3, h, w) as plain tensors on their device; ValueError names the first that is wrong."""
    if len(targets) != len(images):
        raise ValueError(f"{len(targets)} targets for {len(images)} images; each image needs one")
    return [_checked(*pair, f"target {i}", n_classes) for i, pair in enumerate(zip(targets, images, strict=True))]


def _checked(target: Mapping[str, Any], image: Tensor, name: str, n_classes: int) -> Target:
    if missing := [key for key in _NEEDED if key not in target]:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; needed: {', '.join(_NEEDED)}")
    form = getattr(target["boxes"], "format", None)
    if form is not None and getattr(form, "value", form) != "XYXY":
        raise ValueError(f"{name}: boxes are {form}; accepted: XYXY")
    boxes, labels, masks = (_plain(target[key]).to(image.device) for key in _NEEDED)
    boxes, labels = boxes.float(), labels.long()
    count, size = len(boxes), tuple(image.shape[-2:])
    wanted = {"boxes": (count, 4), "labels": (count,), "masks": (count, *size)}
    for key, value in (("boxes", boxes), ("labels", labels), ("masks", masks)):
        if tuple(value.shape) != wanted[key]:
            raise ValueError(f"{name}: {key} of shape {tuple(value.shape)}; needed for {count} boxes: {wanted[key]}")
    wrong = (labels < 0) | (labels >= n_classes)
    if wrong.any():
        raise ValueError(f"{name}: label {int(labels[wrong][0])}; accepted: 0 to {n_classes - 1}")
    bad = ~(boxes.isfinite().all(dim=1) & (boxes[:, 2:] > boxes[:, :2]).all(dim=1))
    if bad.any():
        raise ValueError(
            f"{name}: box {boxes[bad][0].tolist()} has no area (x1 < x2 and y1 < y2 are needed); leave such objects out"
        )
    return Target(boxes, labels, masks)


def _plain(value: Any) -> Tensor:
    """Without the class of torchvision's tv_tensors, which follows through every operation."""
    return torch.as_tensor(value).as_subclass(Tensor)
