"""Boxes, anchors, matching and sampling, and the proposals that are made of them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_iou

from agglo.lab.tasks.detection.model.heads import (
    BACKGROUND,
    NEITHER,
    RPN,
    Assignment,
    HeadSettings,
    ProposalSettings,
    decode,
    level_anchors,
    match,
    sample,
)
from tests.lab.tasks.detection.model.references import difference, moved, suppress

PROPOSALS, BOXES = HeadSettings().proposal_assignment, HeadSettings().box_assignment
STRIDES = (4, 8, 16, 32, 64)
# All anchors are in the sample, so that the loss can be written out.
ALL = HeadSettings(width=6, proposal_assignment=Assignment(0.7, 0.3, 0.3, samples=10**6, positive_share=0.5))


def test_both_ends_of_the_scale_are_limited_and_the_box_ends_with_the_image() -> None:
    reference = [10.0, 20.0, 26.0, 28.0]
    for change in ([0.3, -0.2, 9.0, -9.0], [0.0, 0.0, -5.0, 5.0], [4.0, -4.0, 0.1, 0.2]):
        found = decode(torch.tensor([change]), torch.tensor([reference]), (40, 60))
        torch.testing.assert_close(found[0], torch.tensor(moved(reference, change, (40, 60)), dtype=torch.float32))


def test_anchors_are_unrounded() -> None:
    expected = []
    for row, column, ratio in product(range(3), range(5), (0.5, 1.0, 2.0)):
        height, width = 32 * math.sqrt(ratio), 32 / math.sqrt(ratio)
        x, y = column * 4, row * 4
        expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    torch.testing.assert_close(
        level_anchors(4, (3, 5), 8, (0.5, 1.0, 2.0), torch.device("cpu")), torch.tensor(expected)
    )


def slow_match(candidates: Tensor, objects: Tensor, rules: Assignment) -> list[int]:
    """MMDetection's assigner, step by step, on the same IoU."""
    table = box_iou(objects, candidates).tolist() if len(objects) else []
    found = []
    for c in range(len(candidates)):
        column = [row[c] for row in table]
        best = max(column, default=0.0)
        found.append(NEITHER)
        if best < rules.negative:
            found[c] = BACKGROUND
        if column and best >= rules.positive:
            found[c] = column.index(best)
    for o, row in enumerate(table):
        if row and max(row) >= rules.minimum:
            for c, value in enumerate(row):
                if value == max(row):
                    found[c] = o
    return found


# Few whole coordinates: ties and exact thresholds are common.
corner, side = st.integers(0, 6), st.integers(1, 6)
box = st.tuples(corner, corner, side, side).map(lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]])


@pytest.mark.parametrize("rules", [PROPOSALS, BOXES], ids=["proposals", "boxes"])
@settings(max_examples=60)
@given(st.lists(box, max_size=12), st.lists(box, max_size=6))
def test_matching_is_the_definition(rules: Assignment, candidates: list, objects: list) -> None:
    boxes = [torch.tensor(value, dtype=torch.float32).reshape(-1, 4) for value in (candidates, objects)]
    assert match(*boxes, rules).tolist() == slow_match(*boxes, rules)


def test_a_sample_has_its_share_of_positives_and_negatives_for_the_rest() -> None:
    for positives, negatives, expected in ((500, 5000, (128, 128)), (10, 5000, (10, 246)), (0, 30, (0, 30))):
        matched = torch.cat([torch.arange(positives), torch.full((negatives,), BACKGROUND), torch.full((9,), NEITHER)])
        positive, negative = sample(matched, PROPOSALS)
        assert (len(positive.unique()), len(negative.unique())) == expected
        assert (len(positive), len(negative)) == expected
        assert (matched[positive] >= 0).all() and (matched[negative] == BACKGROUND).all()


def pyramid(height: int, width: int, batch: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, 6, -(-height // stride), -(-width // stride)) for stride in STRIDES]


def a_head() -> RPN:
    torch.manual_seed(0)
    head = RPN(STRIDES, ALL)
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
    levels, sizes, best = head(maps), [(50, 90), (64, 33)], ProposalSettings(per_level=40, kept=60, iou=0.7)
    for i, found in enumerate(head.proposals(levels, sizes, best)):
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
