"""The second stage: class, exact box and mask of each proposal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import batched_nms, roi_align

from agglo.detection.model.boxes import decode, encode, full_precision
from agglo.detection.model.masks import paste, targets_in_boxes
from agglo.detection.model.matching import match, sample
from agglo.detection.model.settings import HeadSettings
from agglo.detection.model.targets import Target

Size = tuple[int, int]


def level_of(boxes: Tensor, finest_scale: float, levels: int) -> Tensor:
    """(n,) int64: the pyramid level that each box (n, 4) is read from, by its size."""
    side = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).sqrt()
    return (side / finest_scale + 1e-6).log2().floor().clamp(0, levels - 1).long()


def pool(
    pyramid: Sequence[Tensor], strides: Sequence[int], boxes: Sequence[Tensor], side: int, finest_scale: float
) -> Tensor:
    """Features of the boxes [(n, 4), ...] of a batch: (sum of n, width, side, side), in the pyramid's dtype.

    RoIAlign in float32 with the half-pixel shift and as many samples per cell as it has pixels.
    """
    numbered = [torch.cat([torch.full_like(b[:, :1], i), b], dim=1) for i, b in enumerate(boxes)]
    rois = torch.cat(numbered)
    level = level_of(rois[:, 1:], finest_scale, len(strides))
    by_level = level.argsort(stable=True)
    counts = level.bincount(minlength=len(strides)).tolist()
    parts = [rois.new_zeros(0, pyramid[0].shape[1], side, side)]
    with full_precision(rois.device):
        for features, stride, part in zip(pyramid, strides, rois[by_level].split(counts), strict=True):
            if len(part):
                parts.append(roi_align(features.float(), part, side, 1 / stride, sampling_ratio=0, aligned=True))
    pooled = torch.cat(parts)[by_level.argsort()]
    return pooled.to(pyramid[0].dtype)


class BoxHead(nn.Module):
    """Two linear layers, then logits of all classes with background last, and one box difference per class."""

    def __init__(self, n_classes: int, settings: HeadSettings) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.fc1 = nn.Linear(settings.width * settings.box_pool**2, settings.box_width)
        self.fc2 = nn.Linear(settings.box_width, settings.box_width)
        self.classes = nn.Linear(settings.box_width, n_classes + 1)
        self.differences = nn.Linear(settings.box_width, n_classes * 4)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(self.classes.weight, std=0.01)
        nn.init.normal_(self.differences.weight, std=0.001)
        for layer in (self.fc1, self.fc2, self.classes, self.differences):
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """(n, width, side, side) -> logits (n, n_classes + 1), differences (n, n_classes, 4), both float32."""
        hidden = F.relu(self.fc2(F.relu(self.fc1(pooled.flatten(1)))))
        differences = self.differences(hidden).unflatten(1, (self.n_classes, 4))
        return self.classes(hidden).float(), differences.float()


class MaskHead(nn.Module):
    """3x3 convolutions, a transposed one that doubles the side, and logits of one mask per class."""

    def __init__(self, n_classes: int, settings: HeadSettings) -> None:
        super().__init__()
        width = settings.width
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(settings.mask_convolutions))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.logits = nn.Conv2d(width, n_classes, 1)
        for layer in (*self.convs, self.up, self.logits):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """(n, width, side, side) -> logits (n, n_classes, 2 * side, 2 * side) in float32."""
        for conv in self.convs:
            pooled = F.relu(conv(pooled))
        return self.logits(F.relu(self.up(pooled))).float()


class RoIHeads(nn.Module):
    """strides: of the pyramid levels that boxes are read from."""

    def __init__(self, strides: Sequence[int], n_classes: int, settings: HeadSettings) -> None:
        super().__init__()
        self.strides, self.settings, self.n_classes = tuple(strides), settings, n_classes
        self.box = BoxHead(n_classes, settings)
        self.mask = MaskHead(n_classes, settings)

    def _pool(self, pyramid: Sequence[Tensor], boxes: Sequence[Tensor], side: int) -> Tensor:
        return pool(pyramid[: len(self.strides)], self.strides, boxes, side, self.settings.finest_scale)

    def losses(
        self, pyramid: Sequence[Tensor], proposals: Sequence[Tensor], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Cross entropy of the classes, L1 of the boxes over all sampled proposals, cross entropy of the masks.

        proposals: (n, 4) of each image.
        """
        settings = self.settings
        seen, labels, wanted, positive_boxes, positive_labels, wanted_masks = [], [], [], [], [], []
        with full_precision(pyramid[0].device):
            for boxes, target in zip(proposals, targets, strict=True):
                own = torch.arange(len(target.boxes), device=boxes.device)
                # Each object is a candidate of its own: there is something to learn before proposals are any good.
                matched = torch.cat([own, match(boxes, target.boxes, settings.box_assignment)])
                boxes = torch.cat([target.boxes, boxes])
                positive, negative, stands_for = sample(matched, settings.box_assignment)
                seen.append(torch.cat([boxes[positive], boxes[negative]]))
                label = target.labels[stands_for]
                background = torch.full((len(negative),), self.n_classes, device=boxes.device)
                labels.append(torch.cat([label, background]))
                wanted.append(encode(target.boxes[stands_for], boxes[positive], settings.box_deviations))
                positive_boxes.append(boxes[positive])
                positive_labels.append(label)
                side = 2 * settings.mask_pool
                wanted_masks.append(targets_in_boxes(target.masks, stands_for, boxes[positive], side))
        logits, differences = self.box(self._pool(pyramid, seen, settings.box_pool))
        masks = self.mask(self._pool(pyramid, positive_boxes, settings.mask_pool))
        with full_precision(logits.device):
            label, count = torch.cat(labels), max(len(logits), 1)
            chosen = (label < self.n_classes).nonzero()[:, 0]
            of_class = torch.cat(positive_labels)
            loss_mask = F.binary_cross_entropy_with_logits(
                masks[torch.arange(len(masks), device=masks.device), of_class], torch.cat(wanted_masks), reduction="sum"
            )
            return {
                "loss_cls": F.cross_entropy(logits, label, reduction="sum") / count,
                "loss_bbox": F.l1_loss(differences[chosen, of_class], torch.cat(wanted), reduction="sum") / count,
                "loss_mask": loss_mask / max(math.prod(masks[:, 0].shape), 1),
            }

    @torch.no_grad()
    def detect(
        self, pyramid: Sequence[Tensor], proposals: Sequence[Tensor], sizes: Sequence[Size], original: Sequence[Size]
    ) -> list[dict[str, Tensor]]:
        """Detections of each image in pixels of its original size, best first.

        sizes: (height, width) of each image as given to the detector, without padding.
        """
        logits, differences = self.box(self._pool(pyramid, proposals, self.settings.box_pool))
        counts = [len(boxes) for boxes in proposals]
        with full_precision(logits.device):
            found = [
                self._best(*parts)
                for parts in zip(
                    logits.split(counts), differences.split(counts), proposals, sizes, original, strict=True
                )
            ]
        read = [
            boxes * _scales(boxes, old, new) for (boxes, _, _), old, new in zip(found, original, sizes, strict=True)
        ]
        squares = self.mask(self._pool(pyramid, read, self.settings.mask_pool)).sigmoid()
        results = []
        for (boxes, scores, labels), square, size in zip(
            found, squares.split([len(b) for b in read]), original, strict=True
        ):
            square = square[torch.arange(len(labels), device=labels.device), labels]
            masks = paste(square, boxes, size, self.settings.mask_threshold)
            results.append({"boxes": boxes, "scores": scores, "labels": labels, "masks": masks})
        return results

    def _best(
        self, logits: Tensor, differences: Tensor, proposals: Tensor, size: Size, original: Size
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes (k, 4), scores (k,) and labels (k,) of one image; suppression is per class, in original pixels."""
        scores = logits.softmax(dim=1)[:, : self.n_classes]
        boxes = decode(differences, proposals[:, None], self.settings.box_deviations, inside=size)
        boxes = boxes * _scales(boxes, size, original)
        box, label = (scores > self.settings.score_threshold).nonzero(as_tuple=True)
        boxes, scores = boxes[box, label], scores[box, label]
        best = batched_nms(boxes, scores, label, self.settings.suppression_iou)[: self.settings.detections]
        return boxes[best], scores[best], label[best]


def _scales(like: Tensor, old: Size, new: Size) -> Tensor:
    """(4,): what the coordinates of a box are multiplied by from one image size to another."""
    y, x = new[0] / old[0], new[1] / old[1]
    return like.new_tensor([x, y, x, y])
