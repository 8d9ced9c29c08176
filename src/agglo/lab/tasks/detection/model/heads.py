"""The two stages of Mask R-CNN: proposals of boxes on the pyramid, then class, exact box and mask of each proposal.

Boxes are (x1, y1, x2, y2), as MMDetection defines them. A delta (dx, dy, dw, dh) moves the centre of a reference box by
(dx, dy) times its width and height, and scales its width and height by (exp dw, exp dh); all four are divided by
`deviations` in training. What layers give is cast to float32, so that under autocast boxes do not move by pixels and
losses do not overflow. torchvision's Matcher and sampler differ from `match` and `sample`: there each object gets its
best candidate however bad, and the sample depends on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import batched_nms, box_convert, box_iou, clip_boxes_to_image, roi_align

from agglo.checks import choice

Size = tuple[int, int]

# No predicted box is more than 62.5 times larger or smaller than its reference: exp stays finite.
LARGEST_LOG_SCALE = math.log(1000 / 16)
NO_DEVIATIONS = (1.0, 1.0, 1.0, 1.0)
BACKGROUND, NEITHER = -1, -2


@dataclass(frozen=True)
class Assignment:
    """Which candidate boxes stand for an object, which for background, and how many of each a loss sees."""

    positive: float  # a candidate stands for the object it overlaps most, from this IoU on
    negative: float  # it is background below this IoU, and neither in between
    minimum: float  # the candidates that overlap an object most stand for it in any case, from this IoU on
    samples: int  # candidates per image that the loss sees
    positive_share: float  # of them, at most


@dataclass(frozen=True)
class ProposalSettings:
    """Best boxes of each pyramid level before suppression, boxes kept per image after it, and its IoU threshold."""

    per_level: int
    kept: int
    iou: float = 0.7


@dataclass(frozen=True)
class HeadSettings:
    """Every number of the heads; the defaults are those of MMDetection 2.x's Mask R-CNN, as the study trained it."""

    width: int = 256  # channels of the pyramid and of the convolutions in the heads
    anchor_scale: float = 8  # side of the square anchor, in strides of its level
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # height / width
    proposal_assignment: Assignment = Assignment(0.7, 0.3, 0.3, samples=256, positive_share=0.5)
    training_proposals: ProposalSettings = ProposalSettings(per_level=2000, kept=1000)
    test_proposals: ProposalSettings = ProposalSettings(per_level=1000, kept=1000)
    finest_scale: float = 56  # sqrt(area) below twice this reads the finest level, below four times the second, ...
    box_pool: int = 7  # side of the pooled features
    mask_pool: int = 14  # masks have twice this side
    box_width: int = 1024  # of the box head's two layers
    box_deviations: tuple[float, float, float, float] = (0.1, 0.1, 0.2, 0.2)
    box_assignment: Assignment = Assignment(0.5, 0.5, 0.5, samples=512, positive_share=0.25)
    mask_convolutions: int = 4
    score_threshold: float = 0.05
    suppression_iou: float = 0.5
    detections: int = 100
    mask_threshold: float = 0.5


def head_settings(options: Mapping[str, Any]) -> HeadSettings:
    """Return the usual settings of the heads with some of them changed; a table changes some of a group.

    >>> head_settings({"width": 64, "test_proposals": {"kept": 100}}).test_proposals
    ProposalSettings(per_level=1000, kept=100, iou=0.7)
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        choice("head_options", name, [each.name for each in fields(HeadSettings)])
        if isinstance(value, Mapping):
            value = replace(getattr(HeadSettings, name), **value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return HeadSettings(**values)


def encode(boxes: Tensor, references: Tensor, deviations: Sequence[float] = NO_DEVIATIONS) -> Tensor:
    """Return the deltas (..., 4) that turn reference boxes (..., 4) into `boxes` (..., 4)."""
    box, reference = (box_convert(some, "xyxy", "cxcywh") for some in (boxes, references))
    centre, size = (box[..., :2] - reference[..., :2]) / reference[..., 2:], box[..., 2:] / reference[..., 2:]
    return torch.cat([centre, size.log()], dim=-1) / boxes.new_tensor(deviations)


def decode(
    deltas: Tensor, references: Tensor, inside: tuple[int, int], deviations: Sequence[float] = NO_DEVIATIONS
) -> Tensor:
    """Return the boxes (..., 4) that predicted deltas make of reference boxes, cut at an image's (height, width)."""
    deltas = deltas * deltas.new_tensor(deviations)
    reference = box_convert(references, "xyxy", "cxcywh")
    centre = reference[..., :2] + deltas[..., :2] * reference[..., 2:]
    size = reference[..., 2:] * deltas[..., 2:].clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE).exp()
    return clip_boxes_to_image(box_convert(torch.cat([centre, size], dim=-1), "cxcywh", "xyxy"), inside)


def level_anchors(
    stride: int, grid: Sequence[int], scale: float, ratios: Sequence[float], device: torch.device
) -> Tensor:
    """Return the anchors (height * width * ratios, 4) of a level, row by row, all ratios of a position together.

    Each has the area of a square of side scale * stride, and height / width as in `ratios`. Other than torchvision's,
    they are not rounded.
    """
    ratio = torch.tensor(ratios, device=device, dtype=torch.float32)
    height, width = stride * scale * ratio.sqrt(), stride * scale / ratio.sqrt()
    around_zero = torch.stack([-width, -height, width, height], dim=-1) / 2
    y, x = (torch.arange(n, device=device, dtype=torch.float32) * stride for n in grid)
    y, x = torch.meshgrid(y, x, indexing="ij")
    return (torch.stack([x, y, x, y], dim=-1)[:, :, None] + around_zero).flatten(0, 2)


def match(candidates: Tensor, objects: Tensor, rules: Assignment) -> Tensor:
    """Return the object (n,) among (m, 4) that each candidate box (n, 4) stands for, or BACKGROUND, or NEITHER.

    The best candidates of an object, all that tie included, come last and overwrite: a later object wins.
    """
    if not len(objects) or not len(candidates):
        return torch.full((len(candidates),), BACKGROUND, device=candidates.device)
    iou = box_iou(objects, candidates)
    best, nearest = iou.max(dim=0)
    matched = torch.where(best >= rules.positive, nearest, torch.where(best < rules.negative, BACKGROUND, NEITHER))
    of_object = iou.amax(dim=1, keepdim=True)
    claims = (iou == of_object) & (of_object >= rules.minimum)
    numbers = torch.arange(len(objects), device=iou.device)[:, None]
    claimed_by = torch.where(claims, numbers, BACKGROUND).amax(dim=0)
    return torch.where(claimed_by >= 0, claimed_by, matched)


def sample(matched: Tensor, rules: Assignment) -> tuple[Tensor, Tensor]:
    """Draw from matched candidates (n,) indices of positives up to their share, and of negatives for the rest."""
    positive = _draw((matched >= 0).nonzero()[:, 0], int(rules.samples * rules.positive_share))
    negative = _draw((matched == BACKGROUND).nonzero()[:, 0], rules.samples - len(positive))
    return positive, negative


def _draw(indices: Tensor, at_most: int) -> Tensor:
    if len(indices) <= at_most:
        return indices
    # Drawn by the CPU's generator whatever the device: a run gives the same sample everywhere.
    return indices[torch.randperm(len(indices))[:at_most].sort().values.to(indices.device)]


class RPNLevel(NamedTuple):
    """The predictions of one level: anchors (n, 4), objectness logits (B, n), deltas (B, n, 4)."""

    anchors: Tensor
    logits: Tensor
    deltas: Tensor


class RPN(nn.Module):
    """The region proposal network on pyramid levels of these strides."""

    def __init__(self, strides: Sequence[int], settings: HeadSettings) -> None:
        super().__init__()
        self.strides, self.settings = tuple(strides), settings
        width, ratios = settings.width, len(settings.anchor_ratios)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.objectness, self.differences = nn.Conv2d(width, ratios, 1), nn.Conv2d(width, 4 * ratios, 1)
        for module in self.children():
            nn.init.normal_(module.weight, std=0.01)  # type: ignore[arg-type]
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, pyramid: Sequence[Tensor]) -> list[RPNLevel]:
        """Return what is predicted on maps (B, width, H, W) of all levels, in float32."""
        levels = []
        for stride, features in zip(self.strides, pyramid, strict=True):
            hidden = F.relu(self.conv(features))
            logits = self.objectness(hidden).permute(0, 2, 3, 1).flatten(1).float()
            deltas = self.differences(hidden).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)).float()
            scale, ratios = self.settings.anchor_scale, self.settings.anchor_ratios
            anchors = level_anchors(stride, features.shape[-2:], scale, ratios, features.device)
            levels.append(RPNLevel(anchors, logits, deltas))
        return levels

    def losses(
        self, levels: Sequence[RPNLevel], padded: Sequence[Size], objects: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return cross entropy and L1 over the sampled anchors, both divided by how many were sampled in the batch.

        Anchors outside of an image as padded on its own, which are there because of larger images in the batch, are
        left out. objects: Boxes (m, 4) of each image.
        """
        rules = self.settings.proposal_assignment
        anchors = torch.cat([level.anchors for level in levels])
        logits, deltas = (torch.cat(parts, dim=1) for parts in zip(*(level[1:] for level in levels), strict=True))
        entropy, distance, count = logits.new_zeros(()), logits.new_zeros(()), 0
        x, y = box_convert(anchors, "xyxy", "cxcywh")[:, :2].round().unbind(1)  # centres lie on whole pixels
        for i, boxes in enumerate(objects):
            inside = (x < padded[i][1]) & (y < padded[i][0])
            matched = torch.full((len(anchors),), NEITHER, device=anchors.device)
            matched[inside] = match(anchors[inside], boxes, rules)
            positive, negative = sample(matched, rules)
            seen = torch.cat([positive, negative])
            is_object = (matched[seen] >= 0).float()
            entropy = entropy + F.binary_cross_entropy_with_logits(logits[i, seen], is_object, reduction="sum")
            wanted = encode(boxes[matched[positive]], anchors[positive])
            distance = distance + F.l1_loss(deltas[i, positive], wanted, reduction="sum")
            # MMDetection counts at least one of each kind per image.
            count += max(len(positive), 1) + max(len(negative), 1)
        return {"loss_rpn_cls": entropy / count, "loss_rpn_bbox": distance / count}

    @torch.no_grad()
    def proposals(self, levels: Sequence[RPNLevel], sizes: Sequence[Size], settings: ProposalSettings) -> list[Tensor]:
        """Return the best boxes (n, 4) of each image, best first; suppression is per level.

        Boxes are cut at the border of the image without padding, whose (height, width) is in sizes.
        """
        found = []
        for i, size in enumerate(sizes):
            parts = []
            for number, level in enumerate(levels):
                score, order = level.logits[i].sigmoid().sort(descending=True, stable=True)
                order = order[: settings.per_level]
                boxes = decode(level.deltas[i, order], level.anchors[order], size)
                parts.append((boxes, score[: settings.per_level], torch.full_like(order, number)))
            box, score, number_of = (torch.cat(part) for part in zip(*parts, strict=True))
            has_area = (box[:, 2:] > box[:, :2]).all(dim=1)
            box, score, number_of = box[has_area], score[has_area], number_of[has_area]
            found.append(box[batched_nms(box, score, number_of, settings.iou)[: settings.kept]])
        return found


def level_of(boxes: Tensor, finest_scale: float, levels: int) -> Tensor:
    """Return the pyramid level (n,) int64 that each box (n, 4) is read from, by its size."""
    side = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).sqrt()
    return (side / finest_scale + 1e-6).log2().floor().clamp(0, levels - 1).long()


class BoxHead(nn.Module):
    """Two linear layers, then logits of all classes with background last, and the deltas of one box per class."""

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
        """Return logits (n, n_classes + 1) and deltas (n, n_classes, 4) of (n, width, side, side), both float32."""
        hidden = F.relu(self.fc2(F.relu(self.fc1(pooled.flatten(1)))))
        return self.classes(hidden).float(), self.differences(hidden).unflatten(1, (self.n_classes, 4)).float()


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
        """Return logits (n, n_classes, 2 * side, 2 * side) of (n, width, side, side), in float32."""
        for conv in self.convs:
            pooled = F.relu(conv(pooled))
        return self.logits(F.relu(self.up(pooled))).float()


class RoIHeads(nn.Module):
    """Box head and mask head on pyramid levels of these strides."""

    def __init__(self, strides: Sequence[int], n_classes: int, settings: HeadSettings) -> None:
        super().__init__()
        self.strides, self.settings, self.n_classes = tuple(strides), settings, n_classes
        self.box = BoxHead(n_classes, settings)
        self.mask = MaskHead(n_classes, settings)

    def pool(self, pyramid: Sequence[Tensor], boxes: Sequence[Tensor], side: int) -> Tensor:
        """Return features (sum of n, width, side, side) of the boxes [(n, 4), ...] of a batch, in the pyramid's dtype.

        RoIAlign in float32, aligned and with as many samples per cell as it has pixels, which torchvision's
        MultiScaleRoIAlign does not offer.
        """
        rois = torch.cat([torch.cat([torch.full_like(b[:, :1], i), b], dim=1) for i, b in enumerate(boxes)])
        level = level_of(rois[:, 1:], self.settings.finest_scale, len(self.strides))
        pooled = rois.new_zeros(len(rois), pyramid[0].shape[1], side, side)
        for number, (features, stride) in enumerate(zip(pyramid, self.strides, strict=False)):
            here = level == number
            pooled[here] = roi_align(features.float(), rois[here], side, 1 / stride, sampling_ratio=0, aligned=True)
        return pooled.to(pyramid[0].dtype)

    def losses(
        self, pyramid: Sequence[Tensor], proposals: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return cross entropy of classes and masks, and L1 of boxes, over sampled proposals (n, 4) of each image.

        targets: Boxes (m, 4) float32, labels (m,) int64 and masks (m, h, w) of 0 and 1 of each image.
        """
        rules, deviations, side = self.settings.box_assignment, self.settings.box_deviations, self.settings.mask_pool
        seen, positives, labels, wanted, wanted_masks = ([] for _ in range(5))
        for boxes, target in zip(proposals, targets, strict=True):
            # Each object is a candidate of its own: there is something to learn before proposals are any good.
            own = torch.arange(len(target["boxes"]), device=boxes.device)
            matched = torch.cat([own, match(boxes, target["boxes"], rules)])
            boxes = torch.cat([target["boxes"], boxes])
            positive, negative = sample(matched, rules)
            objects = matched[positive]
            background = torch.full_like(negative, self.n_classes)
            seen.append(torch.cat([boxes[positive], boxes[negative]]))
            positives.append(boxes[positive])
            labels.append(torch.cat([target["labels"][objects], background]))
            wanted.append(encode(target["boxes"][objects], boxes[positive], deviations))
            wanted_masks.append(targets_in_boxes(target["masks"], objects, boxes[positive], 2 * side))
        logits, deltas = self.box(self.pool(pyramid, seen, self.settings.box_pool))
        masks = self.mask(self.pool(pyramid, positives, side))
        label, count = torch.cat(labels), max(len(logits), 1)
        [positive] = (label < self.n_classes).nonzero(as_tuple=True)
        of_class = label[positive]
        masks = masks[torch.arange(len(masks), device=masks.device), of_class]
        mask_loss = F.binary_cross_entropy_with_logits(masks, torch.cat(wanted_masks), reduction="sum")
        return {
            "loss_cls": F.cross_entropy(logits, label, reduction="sum") / count,
            "loss_bbox": F.l1_loss(deltas[positive, of_class], torch.cat(wanted), reduction="sum") / count,
            "loss_mask": mask_loss / max(masks.numel(), 1),
        }

    @torch.no_grad()
    def detect(
        self, pyramid: Sequence[Tensor], proposals: Sequence[Tensor], sizes: Sequence[Size], original: Sequence[Size]
    ) -> list[dict[str, Tensor]]:
        """Return the detections of each image, best first, in pixels of its original size.

        sizes and original are (height, width) of each image: without padding, and in which detections are wanted.
        """
        logits, deltas = self.box(self.pool(pyramid, proposals, self.settings.box_pool))
        counts = [len(boxes) for boxes in proposals]
        parts = zip(logits.split(counts), deltas.split(counts), proposals, sizes, original, strict=True)
        found = [self._best(*part) for part in parts]
        read = [resize_boxes(boxes, old, new) for (boxes, *_), old, new in zip(found, original, sizes, strict=True)]
        squares = self.mask(self.pool(pyramid, read, self.settings.mask_pool)).sigmoid().split(list(map(len, read)))
        results = []
        for (boxes, scores, labels), square, size in zip(found, squares, original, strict=True):
            of_class = square[torch.arange(len(labels), device=labels.device), labels]
            masks = paste(of_class, boxes, size, self.settings.mask_threshold)
            results.append({"boxes": boxes, "scores": scores, "labels": labels, "masks": masks})
        return results

    def _best(self, logits: Tensor, deltas: Tensor, proposals: Tensor, size: Size, original: Size) -> Sequence[Tensor]:
        """Return boxes (k, 4), scores (k,) and labels (k,) of one image; suppression is per class, after scaling."""
        scores = logits.softmax(dim=1)[:, : self.n_classes]
        boxes = decode(deltas, proposals[:, None], size, self.settings.box_deviations)
        box, label = (scores > self.settings.score_threshold).nonzero(as_tuple=True)
        boxes, scores = resize_boxes(boxes[box, label], size, original), scores[box, label]
        best = batched_nms(boxes, scores, label, self.settings.suppression_iou)[: self.settings.detections]
        return boxes[best], scores[best], label[best]


def targets_in_boxes(masks: Tensor, objects: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Return what the mask head should predict for boxes (n, 4): (n, side, side) float32 of 0 and 1.

    The mask (h, w) of the box's object (n,) is averaged over each cell; the cell is 1 from one half on.
    """
    boxes = clip_boxes_to_image(boxes, (masks.shape[-2], masks.shape[-1]))
    rois = torch.cat([objects[:, None].to(boxes.dtype), boxes], dim=1)
    shares = roi_align(masks[:, None].to(boxes.dtype), rois, side, sampling_ratio=0, aligned=True)[:, 0]
    return (shares >= 0.5).float()


def paste(probabilities: Tensor, boxes: Tensor, size: Size, threshold: float) -> Tensor:
    """Return masks (n, H, W) bool of an image of `size`: the squares (n, s, s) stretched over the boxes (n, 4).

    Each pixel reads the square bilinearly at its centre, and belongs to the object from `threshold` on; torchvision
    rounds boxes to whole pixels first.
    """
    pasted = torch.zeros(len(boxes), *size, dtype=torch.bool, device=boxes.device)
    for mask, square, box in zip(pasted, probabilities, boxes, strict=True):
        x1, y1, x2, y2 = box.tolist()
        if not (x2 > x1 and y2 > y1):
            continue
        left, right = max(int(x1) - 1, 0), min(int(x2) + 2, size[1])
        top, bottom = max(int(y1) - 1, 0), min(int(y2) + 2, size[0])
        # Positions of pixel centres in the box: -1 at its start, 1 at its end.
        x, y = (
            (torch.arange(first, last, device=box.device) + 0.5 - box[i]) / (box[i + 2] - box[i]) * 2 - 1
            for i, (first, last) in enumerate(((left, right), (top, bottom)))
        )
        positions = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        values = F.grid_sample(square[None, None].float(), positions[None], align_corners=False)[0, 0]
        mask[top:bottom, left:right] = values >= threshold
    return pasted
