from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from agglo.detection.model import matching
from agglo.detection.model.matching import BACKGROUND, NEITHER, match, sample
from agglo.detection.model.settings import Assignment, HeadSettings

RPN = HeadSettings().proposal_assignment
ROI = HeadSettings().box_assignment


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
@pytest.mark.parametrize("pairs_at_once", [2**23, 20], ids=["whole", "in parts"])
@settings(max_examples=60, deadline=None)
@given(st.lists(box, max_size=12), st.lists(box, max_size=6))
def test_matching_is_the_definition(pairs_at_once: int, rules: Assignment, candidates: list, objects: list) -> None:
    boxes = [torch.tensor(value, dtype=torch.float32).reshape(-1, 4) for value in (candidates, objects)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_PAIRS_AT_ONCE", pairs_at_once)
        assert match(*boxes, rules).tolist() == slow_match(*boxes, rules)


def test_torchvisions_matcher_agrees_without_ties() -> None:
    torch.manual_seed(0)
    start = torch.rand(400, 2) * 60
    candidates = torch.cat([start, start + torch.rand(400, 2) * 40 + 5], dim=1)
    objects = candidates[::80] + torch.randn(5, 4)
    ours = match(candidates, objects, RPN)
    theirs = Matcher(0.7, 0.3, allow_low_quality_matches=True)(box_iou(objects, candidates))
    assert (ours >= 0).sum() >= 5
    assert torch.equal(ours, theirs)


def test_an_object_too_far_from_every_candidate_gets_none() -> None:
    """Here torchvision differs: it gives each object its best candidate, however bad."""
    candidates, objects = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[0.0, 0, 2, 2]])
    assert match(candidates, objects, RPN).tolist() == [BACKGROUND]
    assert Matcher(0.7, 0.3, allow_low_quality_matches=True)(box_iou(objects, candidates)).tolist() == [0]


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"), [(500, 5000, (128, 128)), (10, 5000, (10, 246)), (0, 30, (0, 30))]
)
def test_a_sample_has_its_share_of_positives_and_negatives_for_the_rest(
    positives: int, negatives: int, expected: tuple[int, int]
) -> None:
    matched = torch.cat([torch.arange(positives), torch.full((negatives,), BACKGROUND), torch.full((9,), NEITHER)])
    drawn = sample(matched, RPN)
    assert (len(drawn.positive), len(drawn.negative)) == expected
    assert len(drawn.positive.unique()) == expected[0] and len(drawn.negative.unique()) == expected[1]
    assert torch.equal(matched[drawn.positive], drawn.objects) and (matched[drawn.negative] == BACKGROUND).all()


def test_the_sample_is_random_and_even() -> None:
    torch.manual_seed(0)
    matched = torch.full((40,), BACKGROUND)
    rules = Assignment(0.5, 0.5, 0.5, samples=10, positive_share=0.25)
    counts = torch.zeros(40)
    for _ in range(800):
        counts[sample(matched, rules).negative] += 1
    assert counts.sum() == 8000 and (counts - 200).abs().max() < 70  # five standard deviations


@pytest.mark.parametrize(
    "wrong", [{"positive": 0.2, "negative": 0.3}, {"minimum": 1.5}, {"samples": 0}, {"positive_share": 0.0}]
)
def test_rules_that_contradict_themselves_are_named(wrong: dict) -> None:
    rules = {"positive": 0.7, "negative": 0.3, "minimum": 0.3, "samples": 256, "positive_share": 0.5} | wrong
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
        Assignment(**rules)
