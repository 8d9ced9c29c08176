"""Counts after each block, against the published lists and by hand; and schedules as values."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agglo.methods.class_attention import EvoViT
from agglo.methods.tome import ToMe
from agglo.plan import Plan
from agglo.schedule import (
    Constant,
    Counts,
    Geometric,
    Linear,
    PerBlock,
    Schedule,
    Stages,
    as_schedule,
)


@pytest.mark.parametrize(
    ("rate", "counts"), [(0.25, [49, 12, 3]), (0.5, [98, 49, 24]), (0.7, [137, 96, 67]), (0.9, [176, 158, 142])]
)
def test_published_stage_counts(rate: float, counts: list[int]) -> None:
    after = Stages(rate).counts(196, 12)
    assert after == [196] * 3 + [counts[0]] * 3 + [counts[1]] * 3 + [counts[2]] * 3
    assert Stages(rate, blocks=(3, 6, 9)).counts(196, 12) == after


def test_published_linear_lists() -> None:
    lists = {
        (16, 12): "32,29,26,23,20,17,14,11,8,5,2,0",
        (8, 24): "16,15,14,13,13,12,11,11,10,9,9,8,7,6,6,5,4,4,3,2,2,1,0,0",
    }
    for (t, depth), text in lists.items():
        assert Linear(t).removals(depth) == [int(number) for number in text.split(",")]


def test_published_final_counts_of_exact_removal() -> None:
    assert [Constant(16).counts(196, 12)[-1], Linear(8).counts(196, 24)[-1], Linear(7).counts(256, 32)[-1]] == [
        4,
        15,
        47,
    ]


def test_geometric() -> None:
    assert Geometric(0.8).counts(196, 12) == [196] * 3 + [int(196 * Fraction(4, 5) ** m) for m in range(1, 10)]


@given(st.integers(1, 99), st.integers(1, 5000), st.integers(1, 3))
def test_rates_in_percent_are_exact(percent: int, n: int, stages: int) -> None:
    exact = [math.floor(n * Fraction(percent, 100) ** m) for m in range(1, stages + 1)]
    schedule = Stages(percent / 100, blocks=range(stages))
    if exact[-1] < 1:
        with pytest.raises(ValueError, match="at least 1"):
            schedule.counts(n, stages)
    else:
        assert schedule.counts(n, stages) == exact
    assert schedule.counts(n, stages, strict=False) == [max(1, count) for count in exact]


def test_the_nearest_possible_counts_of_few_tokens() -> None:
    assert Constant(3).counts(8, 4, strict=False) == [5, 2, 1, 1]
    assert Counts((20, 5, 2), blocks=(0, 1, 3)).counts(9, 4, strict=False) == [9, 5, 5, 2]
    assert Stages((0.25, 1.0), blocks=(0, 2), returning=True).counts(9, 4, strict=False) == [2, 2, 9, 9]
    assert Plan(Constant(3)).targets(EvoViT(), 8, 4) == [5, 2, 1, None]
    assert Plan(Stages(0.5, blocks=(0, 1, 2))).targets(ToMe(), 7, 4) == [4, 2, None, None]
    with pytest.raises(ValueError, match="tome cannot go from 4 to 1"):
        Plan(Stages(0.5, blocks=(0, 1))).targets(ToMe(), 7, 4, strict=True)


def test_rates_and_counts_per_stage_and_removals_per_block() -> None:
    assert as_schedule([3, 0, 20]).counts(100, 5) == [97, 97, 77, 77, 77]
    assert Stages(0.7, nested=True).counts(196, 12)[3::3] == [137, 95, 66], "floors add up"
    assert Stages([0.5, 0.9, 0.1], blocks=(1, 2, 3)).counts(100, 4) == [100, 50, 45, 4]
    assert Counts((90, 30, 10)).counts(196, 12)[3::3] == [90, 30, 10]


@pytest.mark.parametrize(
    ("make", "message"),  # numbers, flags and lists of another kind: tests/test_options.py
    [
        (lambda: Stages(50), r"keep_rate=50 .*did you mean 0.5\?"),
        (lambda: Stages(0.5, nested=True, returning=True), "nested"),
        (lambda: Counts((3,), blocks=(1, 2)), "one value per block"),
        (lambda: Stages([0.5, 0.5]).counts(196, 12), "needs 3 values"),
        (lambda: Stages(0.5, blocks=(6, 3)), "must increase"),
        (lambda: Stages(0.5, blocks=(12,)).counts(196, 12), "depth 12"),
        (lambda: Counts((300, 200, 100)).counts(196, 12), "only 196"),
        (lambda: Constant(20).counts(196, 12), r"Constant\(20\).*at least 1"),
        (lambda: Constant(4, start=12).counts(196, 12), "start=12"),
        (lambda: PerBlock([1, 1, 1]).counts(9, 2), "the model has 2"),
        (lambda: as_schedule(0.5), "schedule=0.5"),
    ],
)
def test_impossible_requests_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


TEXTS: dict[str, Schedule] = {
    "stages:0.3333333333333333": Stages(1 / 3),
    "stages:0.9,0.7,0.5,blocks=[3,6,9]": Stages([0.9, 0.7, 0.5], blocks=[3, 6, 9]),
    "stages:[0.5],blocks=[3]": Stages([0.5], blocks=[3]),
    "stages:0.7,nested=true": Stages(0.7, nested=True),
    "stages:1,blocks=[4,8],returning=true": Stages(1, (4, 8), returning=True),
    "counts:90,30": Counts((90, 30)),
    "counts:[90],blocks=[4]": Counts((90,), blocks=(4,)),
    "constant:14,start=3": Constant(14, start=3),
    "linear:0": Linear(0),
    "geometric:0.8": Geometric(0.8, start=3),
    "per_block:0,0,0,49": PerBlock([0, 0, 0, 49]),
    "per_block:[5]": PerBlock([5]),
}


@pytest.mark.parametrize("text", TEXTS)
def test_every_form_gives_the_same_schedule_back(text: str) -> None:
    schedule = TEXTS[text]
    assert str(schedule) == text
    spaced = as_schedule(f" {text.replace(',', ', ')} ")
    for again in (as_schedule(text), spaced, eval(repr(schedule)), pickle.loads(pickle.dumps(schedule))):
        assert again == schedule and hash(again) == hash(schedule) and type(again) is type(schedule)
        assert (repr(again), str(again)) == (repr(schedule), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lineal:3", r"did you mean 'linear'\?"),
        ("constant", "needs t"),
        ("constant:1,2", r"t=\(1, 2\)"),
        ("stages:0.5,blocks=[3", "no closing"),
        ("linear:16,start=3", "'start'"),
        ("counts:9,,3", "between two commas"),
    ],
)
def test_texts_that_are_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_schedule(text)
