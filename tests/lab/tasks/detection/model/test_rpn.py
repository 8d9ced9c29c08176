from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agglo.lab.tasks.detection.model.heads import BACKGROUND, RPN, Assignment, HeadSettings, ProposalSettings, match
from tests.lab.tasks.detection.model.references import difference, moved, suppress

STRIDES = (4, 8, 16, 32, 64)
# All anchors are in the sample, so that the loss can be written out.
ALL = HeadSettings(width=6, proposal_assignment=Assignment(0.7, 0.3, 0.3, samples=10**6, positive_share=0.5))


def pyramid(height: int, width: int, batch: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, 6, -(-height // stride), -(-width // stride)) for stride in STRIDES]


def a_head(settings: HeadSettings = ALL) -> RPN:
    torch.manual_seed(0)
    head = RPN(STRIDES, settings)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def test_each_prediction_belongs_to_its_anchor() -> None:
    """Row by row, and all ratios of a position together: as the anchors are."""
    head, maps = a_head(), pyramid(64, 96, 2)
    level = head(maps)[2]
    hidden = torch.relu(head.conv(maps[2]))
    logits, differences = head.objectness(hidden), head.differences(hidden)
    height, width = maps[2].shape[-2:]
    for row, column, ratio in [(0, 0, 0), (1, 4, 2), (3, 5, 1)]:
        index = (row * width + column) * 3 + ratio
        centre = (level.anchors[index, :2] + level.anchors[index, 2:]) / 2
        torch.testing.assert_close(centre, torch.tensor([column * 16.0, row * 16.0]), atol=1e-4, rtol=0)
        assert torch.equal(level.logits[:, index], logits[:, ratio, row, column])
        assert torch.equal(level.deltas[:, index], differences[:, 4 * ratio : 4 * ratio + 4, row, column])
    assert len(level.anchors) == height * width * 3


@torch.no_grad()
def test_losses_are_sums_over_the_sample_divided_by_its_size() -> None:
    """The second image is smaller than the batch, the third has no object: it still counts one positive."""
    head, maps = a_head(), pyramid(64, 96, 3)
    padded = [(64, 96), (32, 64), (64, 96)]
    objects = [torch.tensor([[5.0, 8, 40, 50], [50, 4, 90, 60]]), torch.tensor([[3.0, 3, 30, 29]]), torch.zeros(0, 4)]
    levels = head(maps)
    found = head.losses(levels, padded, objects)
    entropy = distance = 0.0
    count = 0
    for i, boxes in enumerate(objects):
        seen = {True: 0, False: 0}
        # Matched among all anchors of the image, at every level together.
        anchors, logits, changes = [], [], []
        for stride, features, level in zip(STRIDES, maps, levels, strict=True):
            width = features.shape[-1]
            for index, anchor in enumerate(level.anchors.tolist()):
                row, column = divmod(index // 3, width)
                if row * stride < padded[i][0] and column * stride < padded[i][1]:
                    anchors.append(anchor)
                    logits.append(float(level.logits[i, index]))
                    changes.append(level.deltas[i, index].tolist())
        matched = match(torch.tensor(anchors), boxes, ALL.proposal_assignment).tolist()
        for anchor, logit, change, stands_for in zip(anchors, logits, changes, matched, strict=True):
            if stands_for < BACKGROUND:
                continue
            is_object = stands_for >= 0
            seen[is_object] += 1
            probability = 1 / (1 + math.exp(-logit))
            entropy -= math.log(probability if is_object else 1 - probability)
            if is_object:
                wanted = difference(boxes[stands_for].tolist(), anchor)
                distance += sum(abs(a - b) for a, b in zip(change, wanted, strict=True))
        assert (seen[True] > 0) == (len(boxes) > 0)
        count += max(seen[True], 1) + max(seen[False], 1)
    assert float(found["loss_rpn_cls"]) == pytest.approx(entropy / count, rel=1e-4)
    assert float(found["loss_rpn_bbox"]) == pytest.approx(distance / count, rel=1e-4)


@torch.no_grad()
def test_proposals_are_the_best_of_each_level_after_suppression() -> None:
    head, maps = a_head(), pyramid(64, 96, 2)
    levels, sizes, settings = head(maps), [(50, 90), (64, 33)], ProposalSettings(per_level=40, kept=60, iou=0.7)
    for i, found in enumerate(head.proposals(levels, sizes, settings)):
        boxes, scores, groups = [], [], []
        for number, level in enumerate(levels):
            order = sorted(range(len(level.anchors)), key=lambda a: -float(level.logits[i, a]))[:40]
            for a in order:
                box = moved(level.anchors[a].tolist(), level.deltas[i, a].tolist(), sizes[i])
                if box[2] > box[0] and box[3] > box[1]:
                    boxes.append(box)
                    scores.append(float(level.logits[i, a]))
                    groups.append(number)
        kept = suppress(boxes, scores, groups, 0.7)[:60]
        assert 5 < len(kept) < len(boxes)
        torch.testing.assert_close(found, torch.tensor([boxes[k] for k in kept]), rtol=1e-4, atol=1e-3)
