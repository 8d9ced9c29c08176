"""Mask R-CNN on any backbone that gives a pyramid of maps, with MMDetection's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from agglo.detection.model.fpn import FPN
from agglo.detection.model.roi import RoIHeads
from agglo.detection.model.rpn import RPN
from agglo.detection.model.settings import HeadSettings
from agglo.detection.model.targets import checked

Size = tuple[int, int]


class Detector(nn.Module):
    """Boxes, classes and masks of the objects in images.

    backbone: called with images (B, 3, H, W) and their sizes before padding; gives one map per `backbone.strides`,
    each with `backbone.out_channels` channels.
    n_classes: without background. settings: every number of the heads.
    left_out: names in the file of weights that a detector has no place for.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, backbone: nn.Module, *, n_classes: int, settings: HeadSettings | None = None) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes={n_classes} must be at least 1; background is not counted")
        settings = settings or HeadSettings()
        strides = tuple(cast("Sequence[int]", backbone.strides))
        channels = cast(int, backbone.out_channels)
        self.n_classes, self.settings, self.strides = n_classes, settings, strides
        self.backbone = backbone
        self.neck = FPN(channels, len(strides), settings.width)
        self.rpn = RPN((*strides, 2 * strides[-1]), settings)
        self.roi = RoIHeads(strides, n_classes, settings)

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Any]] | None = None,
        *,
        original_sizes: Sequence[Size] | None = None,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """In training mode the losses, else the detections of each image.

        images: (3, h, w) each, normalised, of any sizes: they are padded with zeros at the right and the bottom.
        targets: in training mode, one per image: boxes (n, 4) as x1 y1 x2 y2, labels (n,) from 0 to n_classes - 1,
            masks (n, h, w). Crowds are left out.
        original_sizes: (height, width) in which detections are wanted; the images' own if None.

        Losses: scalars loss_rpn_cls, loss_rpn_bbox, loss_cls, loss_bbox, loss_mask; their sum is minimised.
        Detections: boxes (n, 4), scores (n,) falling, labels (n,), masks (n, height, width) bool.
        """
        if self.training and targets is None:
            raise ValueError("targets=None in training mode; call eval() for detections")
        _check(images)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        if original_sizes is not None and len(original_sizes) != len(images):
            raise ValueError(f"{len(original_sizes)} original_sizes for {len(images)} images; each image needs one")
        padded = [self._padded(size) for size in sizes]
        whole = max(height for height, _ in padded), max(width for _, width in padded)
        with _naming(whole, len(images)):
            batch = images[0].new_zeros(len(images), 3, *whole)
            for row, image in zip(batch, images, strict=True):
                row[:, : image.shape[-2], : image.shape[-1]] = image
            pyramid = self.neck(self.backbone(batch, sizes))
            levels = self.rpn(pyramid)
            if not self.training:
                proposals = self.rpn.proposals(levels, sizes, self.settings.test_proposals)
                return self.roi.detect(pyramid, proposals, sizes, original_sizes or sizes)
            objects = checked(targets or (), images, self.n_classes)
            losses = self.rpn.losses(pyramid, levels, padded, [target.boxes for target in objects])
            proposals = self.rpn.proposals(levels, sizes, self.settings.training_proposals)
            return losses | self.roi.losses(pyramid, proposals, objects)

    def _padded(self, size: Size) -> Size:
        """The next multiple of the coarsest stride."""
        step = self.strides[-1]
        height, width = (-(-side // step) * step for side in size)
        return height, width


def _check(images: Sequence[Tensor]) -> None:
    if not len(images):
        raise ValueError("no images")
    for i, image in enumerate(images):
        if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape or not image.is_floating_point():
            found = f"{image.dtype} of shape {tuple(image.shape)}"
            raise ValueError(f"image {i} is {found}; accepted: floating point, (3, height, width), not empty")


@contextmanager
def _naming(size: Size, count: int) -> Iterator[None]:
    """Out of memory says what for: the size of the batch is what a person can change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        # On the CPU torch raises a plain RuntimeError, which only its text tells apart.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "DefaultCPUAllocator" not in text:
            raise
        height, width = size
        raise torch.OutOfMemoryError(
            f"out of memory with {count} images padded to {height} x {width}; "
            f"take fewer at once, or smaller ones ({text.splitlines()[0] if text else 'no more is said'})"
        ) from error
