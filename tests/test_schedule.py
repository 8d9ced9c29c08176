"""Counts after each block, against the published lists and by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agglo.schedule import Constant, Geometric, Linear, PerBlock, Stages, as_schedule, default_blocks


@pytest.mark.parametrize(
    ("rate", "counts"), [(0.25, [49, 12, 3]), (0.5, [98, 49, 24]), (0.7, [137, 96, 67]), (0.9, [176, 158, 142])]
)
def test_published_stage_counts(rate: float, counts: list[int]) -> None:
    after = Stages(rate).counts(196, 12)
    assert after == [196] * 3 + [counts[0]] * 3 + [counts[1]] * 3 + [counts[2]] * 3
    assert Stages(rate, blocks=(3, 6, 9)).counts(196, 12) == after


def test_nested_floors_add_up() -> None:
    assert Stages(0.7, nested=True).counts(196, 12)[3::3] == [137, 95, 66]


LINEAR = {
    (16, 12): "32,29,26,23,20,17,14,11,8,5,2,0",
    (8, 24): "16,15,14,13,13,12,11,11,10,9,9,8,7,6,6,5,4,4,3,2,2,1,0,0",
    (7, 32): "14,13,13,12,12,11,11,10,10,9,9,9,8,8,7,7,6,6,5,5,4,4,4,3,3,2,2,1,1,0,0,0",
}


@pytest.mark.parametrize(("setting", "text"), LINEAR.items())
def test_published_linear_lists(setting: tuple[int, int], text: str) -> None:
    t, depth = setting
    assert Linear(t).removals(depth) == [int(number) for number in text.split(",")]


@pytest.mark.parametrize(
    ("schedule", "n", "depth", "last"),
    [
        (Constant(16), 196, 12, 4),
        (Linear(16), 196, 12, 9),
        (Constant(8), 196, 24, 4),
        (Linear(8), 196, 24, 15),
        (Constant(7), 256, 32, 32),
        (Linear(7), 256, 32, 47),
    ],
)
def test_published_final_counts_of_exact_removal(schedule: PerBlock, n: int, depth: int, last: int) -> None:
    assert schedule.counts(n, depth)[-1] == last


def test_linear_sequence_of_base() -> None:
    with_class = [197, 165, 136, 110, 87, 67, 50, 36, 25, 17, 12, 10, 10]
    assert [count + 1 for count in Linear(16).counts(196, 12)] == with_class[1:]


def test_geometric() -> None:
    counts = Geometric(0.8).counts(196, 12)
    assert counts[:3] == [196] * 3
    assert counts[3:] == [int(196 * Fraction(4, 5) ** m) for m in range(1, 10)]


def test_floating_point_does_not_lose_a_token() -> None:
    assert int(100 * 0.7**2) == 48  # what happens otherwise
    assert Stages(0.7).counts(100, 12)[6] == 49
    assert Stages(1 / 3, blocks=(0,)).counts(3, 1) == [1]
    assert Stages(0.29, blocks=(0,)).counts(100, 1) == [29]


@given(st.integers(1, 99), st.integers(1, 5000), st.integers(1, 3))
def test_rates_in_percent_are_exact(percent: int, n: int, stages: int) -> None:
    exact = [math.floor(n * Fraction(percent, 100) ** m) for m in range(1, stages + 1)]
    schedule = Stages(percent / 100, blocks=range(stages))
    if exact[-1] < 1:
        with pytest.raises(ValueError, match="at least 1"):
            schedule.counts(n, stages)
    else:
        assert schedule.counts(n, stages) == exact


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12))
def test_any_list_removes_exactly_that(removed: list[int]) -> None:
    counts = as_schedule(removed).counts(1000, 12)
    gone = list(accumulate(removed))
    assert counts == [1000 - g for g in gone] + [1000 - gone[-1]] * (12 - len(gone))


def test_rates_and_counts_per_stage() -> None:
    assert Stages([0.5, 0.9, 0.1], blocks=(1, 2, 3)).counts(100, 4) == [100, 50, 45, 4]
    assert Stages(counts=(90, 30, 10)).counts(196, 12)[3::3] == [90, 30, 10]


def test_blocks_scale_with_depth() -> None:
    assert [default_blocks(depth) for depth in (4, 12, 24, 32, 1)] == [
        (1, 2, 3), (3, 6, 9), (6, 12, 18), (8, 16, 24), (0,)]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stages(0.0), "keep_rate=0.0"),
        (lambda: Stages(1.2), "keep_rate=1.2"),
        (lambda: Stages(float("nan")), "keep_rate=nan"),
        (lambda: Stages(True), "keep_rate=True"),
        (lambda: Stages("half"), "keep_rate"),
        (lambda: Stages(), "neither"),
        (lambda: Stages(0.5, counts=(3,)), "both"),
        (lambda: Stages([0.5, 0.5], blocks=(3,)), "one value per block"),
        (lambda: Stages(0.5, blocks=(6, 3)), "must increase"),
        (lambda: Stages(0.5, blocks=(-1,)), "blocks=-1"),
        (lambda: Stages(0.5, blocks=(12,)).counts(196, 12), "depth 12"),
        (lambda: Stages([0.5, 0.5]).counts(196, 12), "needs 3 values"),
        (lambda: Stages(counts=(300, 200, 100)).counts(196, 12), "only 196"),
        (lambda: Stages(0.1).counts(16, 12), "at least 1"),
        (lambda: Constant(20).counts(196, 12), r"Constant\(20\).*at least 1"),
        (lambda: Constant(-1), "t=-1"),
        (lambda: Constant(4, start=12).counts(196, 12), "would do nothing"),
        (lambda: Geometric(0.8, start=12).counts(196, 12), "would do nothing"),
        (lambda: Linear(1.5), "t=1.5"),
        (lambda: PerBlock([1, 2.5]), "removed=2.5"),
        (lambda: PerBlock([1, 1, 1]).counts(9, 2), "the model has 2"),
        (lambda: Geometric(0), "keep_rate=0"),
        (lambda: as_schedule(0.5), "schedule=0.5"),
    ],
)
def test_impossible_requests_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
