"""The region proposal network: boxes that may hold an object, whatever its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import batched_nms

from agglo.detection.model.anchors import level_anchors, usable
from agglo.detection.model.boxes import decode, encode, full_precision
from agglo.detection.model.matching import NEITHER, match, sample
from agglo.detection.model.settings import HeadSettings, ProposalSettings

Size = tuple[int, int]


class Level(NamedTuple):
    """What is predicted at one level: anchors (n, 4), logits (B, n) that they hold an object, differences (B, n, 4)."""

    anchors: Tensor
    logits: Tensor
    differences: Tensor


class RPN(nn.Module):
    """strides: of all levels of the pyramid."""

    def __init__(self, strides: Sequence[int], settings: HeadSettings) -> None:
        super().__init__()
        self.strides, self.settings = tuple(strides), settings
        width, ratios = settings.width, len(settings.anchor_ratios)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.objectness = nn.Conv2d(width, ratios, 1)
        self.differences = nn.Conv2d(width, 4 * ratios, 1)
        for module in (self.conv, self.objectness, self.differences):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, pyramid: Sequence[Tensor]) -> list[Level]:
        """Maps (B, width, H, W) of all levels -> what is predicted there, in float32."""
        levels = []
        for stride, features in zip(self.strides, pyramid, strict=True):
            hidden = F.relu(self.conv(features))
            logits = self.objectness(hidden).permute(0, 2, 3, 1).flatten(1).float()
            differences = self.differences(hidden).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)).float()
            height, width = features.shape[-2:]
            anchors = level_anchors(
                stride, (height, width), self.settings.anchor_scale, self.settings.anchor_ratios, features.device
            )
            levels.append(Level(anchors, logits, differences))
        return levels

    def losses(
        self, pyramid: Sequence[Tensor], levels: Sequence[Level], padded: Sequence[Size], objects: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Cross entropy and L1 over the sampled anchors, both divided by how many were sampled in the batch.

        padded: size of each image padded on its own. objects: its boxes (m, 4).
        """
        rules, device = self.settings.proposal_assignment, pyramid[0].device
        anchors = torch.cat([level.anchors for level in levels])
        logits = torch.cat([level.logits for level in levels], dim=1)
        differences = torch.cat([level.differences for level in levels], dim=1)
        entropy, distance, count = logits.new_zeros(()), logits.new_zeros(()), 0
        with full_precision(device):
            for i, boxes in enumerate(objects):
                inside = torch.cat(
                    [
                        usable(stride, _grid(features), len(self.settings.anchor_ratios), padded[i], device)
                        for stride, features in zip(self.strides, pyramid, strict=True)
                    ]
                )
                matched = torch.full((len(anchors),), NEITHER, device=device)
                matched[inside] = match(anchors[inside], boxes, rules)
                positive, negative, stands_for = sample(matched, rules)
                seen = torch.cat([positive, negative])
                is_object = torch.zeros(len(seen), device=device)
                is_object[: len(positive)] = 1
                entropy = entropy + F.binary_cross_entropy_with_logits(logits[i, seen], is_object, reduction="sum")
                wanted = encode(boxes[stands_for], anchors[positive])
                distance = distance + F.l1_loss(differences[i, positive], wanted, reduction="sum")
                # MMDetection counts at least one of each kind per image.
                count += max(len(positive), 1) + max(len(negative), 1)
        return {"loss_rpn_cls": entropy / count, "loss_rpn_bbox": distance / count}

    @torch.no_grad()
    def proposals(self, levels: Sequence[Level], sizes: Sequence[Size], settings: ProposalSettings) -> list[Tensor]:
        """The best boxes (n, 4) of each image, best first, cut at its border; suppression is per level.

        sizes: (height, width) of each image without padding.
        """
        found = []
        for i, size in enumerate(sizes):
            boxes, scores, numbers = [], [], []
            for number, level in enumerate(levels):
                score, order = level.logits[i].sigmoid().sort(descending=True, stable=True)
                order = order[: settings.per_level]
                boxes.append(decode(level.differences[i, order], level.anchors[order], inside=size))
                scores.append(score[: settings.per_level])
                numbers.append(torch.full_like(order, number))
            box, score, number_of = torch.cat(boxes), torch.cat(scores), torch.cat(numbers)
            has_area = (box[:, 2:] > box[:, :2]).all(dim=1)
            box, score, number_of = box[has_area], score[has_area], number_of[has_area]
            with full_precision(box.device):
                found.append(box[batched_nms(box, score, number_of, settings.iou)[: settings.kept]])
        return found


def _grid(features: Tensor) -> Size:
    return features.shape[-2], features.shape[-1]
