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
    Assignment,
    HeadSettings,
    decode,
    level_anchors,
    match,
    sample,
)
from tests.lab.tasks.detection.model.references import moved

RPN = HeadSettings().proposal_assignment
ROI = HeadSettings().box_assignment
RATIOS = (0.5, 1.0, 2.0)
CPU = torch.device("cpu")


def test_both_ends_of_the_scale_are_limited_and_the_box_ends_with_the_image() -> None:
    reference = [10.0, 20.0, 26.0, 28.0]
    for change in ([0.3, -0.2, 9.0, -9.0], [0.0, 0.0, -5.0, 5.0], [4.0, -4.0, 0.1, 0.2]):
        found = decode(torch.tensor([change]), torch.tensor([reference]), (40, 60))
        torch.testing.assert_close(found[0], torch.tensor(moved(reference, change, (40, 60)), dtype=torch.float32))


def test_anchors_are_unrounded() -> None:
    expected = []
    for row, column, ratio in product(range(3), range(5), RATIOS):
        height, width = 32 * math.sqrt(ratio), 32 / math.sqrt(ratio)
        x, y = column * 4, row * 4
        expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    torch.testing.assert_close(level_anchors(4, (3, 5), 8, RATIOS, CPU), torch.tensor(expected))


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


@pytest.mark.parametrize("rules", [RPN, ROI], ids=["proposals", "boxes"])
@settings(max_examples=60)
@given(st.lists(box, max_size=12), st.lists(box, max_size=6))
def test_matching_is_the_definition(rules: Assignment, candidates: list, objects: list) -> None:
    boxes = [torch.tensor(value, dtype=torch.float32).reshape(-1, 4) for value in (candidates, objects)]
    assert match(*boxes, rules).tolist() == slow_match(*boxes, rules)


def test_a_sample_has_its_share_of_positives_and_negatives_for_the_rest() -> None:
    for positives, negatives, expected in ((500, 5000, (128, 128)), (10, 5000, (10, 246)), (0, 30, (0, 30))):
        matched = torch.cat([torch.arange(positives), torch.full((negatives,), BACKGROUND), torch.full((9,), NEITHER)])
        positive, negative = sample(matched, RPN)
        assert (len(positive.unique()), len(negative.unique())) == expected
        assert (len(positive), len(negative)) == expected
        assert (matched[positive] >= 0).all() and (matched[negative] == BACKGROUND).all()
