"""Mask R-CNN on any backbone that gives a pyramid of maps, with MMDetection's definitions and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from agglo.lab.tasks.detection.model.heads import RPN, HeadSettings, RoIHeads, Size


class Detector(nn.Module):
    """Boxes, classes and masks of the objects in images.

    The backbone is called with images (B, 3, H, W) and their sizes before padding; it gives one map per
    `backbone.strides`, each with `backbone.out_channels` channels. n_classes is without background.
    """

    def __init__(self, backbone: Any, *, n_classes: int, settings: HeadSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = settings or HeadSettings()
        self.n_classes, self.strides = n_classes, tuple(backbone.strides)
        self.backbone: Any = backbone
        # torchvision's pyramid computes what MMDetection's does, whose initial weights it gets here.
        channels = [backbone.out_channels] * len(self.strides)
        pyramid = FeaturePyramidNetwork(channels, settings.width, extra_blocks=LastLevelMaxPool())
        self.neck = Neck({"pyramid": pyramid})
        for module in pyramid.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        self.rpn = RPN((*self.strides, 2 * self.strides[-1]), settings)
        self.roi = RoIHeads(self.strides, n_classes, settings)

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Any]] | None = None,
        *,
        original_sizes: Sequence[Size] | None = None,
    ) -> Any:
        """Return in training mode the losses, else the detections of each image.

        Args:
            images: (3, h, w) each, normalised, of any sizes: they are padded with zeros at the right and the bottom.
            targets: In training mode, one per image: boxes (n, 4) as x1 y1 x2 y2, labels (n,) from 0 to n_classes - 1,
                masks (n, h, w). Crowds are left out.
            original_sizes: (height, width) in which detections are wanted; the images' own if None.

        Returns:
            Losses: scalars loss_rpn_cls, loss_rpn_bbox, loss_cls, loss_bbox, loss_mask, whose sum is minimised.
            Detections: boxes (n, 4), scores (n,) falling, labels (n,), masks (n, height, width) bool.
        """
        targets = targets or ()
        if self.training and len(targets) != len(images):
            raise ValueError(f"{len(targets)} targets for {len(images)} images to train on; eval() gives detections")
        for i, image in enumerate(images):
            if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape or not image.is_floating_point():
                found = f"{image.dtype} of shape {tuple(image.shape)}"
                raise ValueError(f"image {i} is {found}; accepted: floating point, (3, height, width), not empty")
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        step = self.strides[-1]
        padded = [(-(-height // step) * step, -(-width // step) * step) for height, width in sizes]
        batch = images[0].new_zeros(len(images), 3, *map(max, zip(*padded, strict=True)))
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[-2], : image.shape[-1]] = image
        pyramid = self.neck(self.backbone(batch, sizes))
        levels = self.rpn(pyramid)
        if not self.training:
            proposals = self.rpn.proposals(levels, sizes, self.settings.test_proposals)
            return self.roi.detect(pyramid, proposals, sizes, original_sizes or sizes)
        objects = checked(targets, images, self.n_classes)
        losses = self.rpn.losses(levels, padded, [target["boxes"] for target in objects])
        proposals = self.rpn.proposals(levels, sizes, self.settings.training_proposals)
        return losses | self.roi.losses(pyramid, proposals, objects)


class Neck(nn.ModuleDict):
    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return maps (B, width, H, W) of maps (B, C, H, W), one more than given."""
        return list(self["pyramid"](dict(enumerate(maps))).values())


def checked(targets: Sequence[Mapping[str, Any]], images: Sequence[Tensor], n_classes: int) -> list[Any]:
    """Return the targets of images (3, h, w) on their device; ValueError names the first wrong one."""
    found = []
    for i, (target, image) in enumerate(zip(targets, images, strict=True)):
        boxes, labels, masks = (target[name].to(image.device) for name in ("boxes", "labels", "masks"))
        n, size = len(boxes), tuple(image.shape[-2:])
        fits = boxes.shape == (n, 4) and labels.shape == (n,) and masks.shape == (n, *size)
        if not fits or ((labels < 0) | (labels >= n_classes)).any() or not (boxes[:, 2:] > boxes[:, :2]).all():
            labels_wanted = f"labels (n,) from 0 to {n_classes - 1}"
            raise ValueError(f"target {i}: accepted are boxes (n, 4) with an area, {labels_wanted}, masks (n, *{size})")
        found.append({"boxes": boxes.float(), "labels": labels.long(), "masks": masks})
    return found
