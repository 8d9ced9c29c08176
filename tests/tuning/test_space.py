"""The space holds only what a method, `ReductionConfig` and the model accept; its schedules hold the known ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.config import ReductionConfig
from agglo.schedule import Constant, Geometric, Linear, Stages, parse_schedule
from agglo.tuning import space as searched
from agglo.tuning.space import Space, counts_at, schedule_of, space_of


def make(method: str = "atc", depth: int | None = 12, refuse: dict[str, Any] | None = None) -> Space:
    def tries(config: ReductionConfig) -> None:
        assert config.method == method
        if refuse and refuse.items() <= config.given().items():
            raise ValueError("not this one")

    return space_of(method, depth=depth, tries=tries)


def test_options_that_nobody_accepts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    linkages = ({"linkage": "single"}, {"linkage": "complete"})
    monkeypatch.setattr(searched, "OPTIONS", {"atc": {"linkage": linkages, "magic": ({"magic": 1}, {"magic": 2})}})
    monkeypatch.setattr(searched, "EXACT", {"unheard": "of"})
    found = make()
    values = {axis.name: axis.values for axis in found.axes if axis.name not in searched.SCHEDULE_AXES}
    assert values == {"linkage": linkages, "place": searched.PLACE}
    assert found.always == {} and found.left_out == []


def test_a_model_that_takes_a_keep_rate_has_options_alone() -> None:
    found = make("tomesd", depth=None)
    assert [axis.name for axis in found.axes] == ["features"] and found.size == 3 and found.left_out == []


def test_what_the_model_refuses_is_left_out_with_its_reason() -> None:
    found = make(refuse={"linkage": "complete"})
    (linkage,) = (axis for axis in found.axes if axis.name == "linkage")
    assert linkage.values == ({"linkage": "average"},)
    assert found.left_out == ["atc, linkage='complete': not this one"]


def test_a_method_without_a_table_has_schedules_alone() -> None:
    found = make("pool")
    assert {"start", "last", "curve", "stride"} <= {axis.name for axis in found.axes}
    assert all(set(found.values(c)) >= {"method", "start", "last"} for c in found.around(found.first()))


def test_schedules_fit_any_depth() -> None:
    for depth in (2, 3, 4, 12, 24):
        found = make("tome", depth)
        first = found.values(found.first())
        assert first["start"] == depth // 4 and first["last"] == depth - 1
        for axis in found.axes:
            assert all(0 <= value[axis.name] < depth for value in axis.values if axis.name in ("start", "last"))


def test_neighbours_differ_in_one_axis() -> None:
    found = make("tome")
    first = found.first()
    around = found.around(first)
    assert len(around) == sum(len(axis.values) - 1 for axis in found.axes) == len(set(around))
    assert all(sum(a != b for a, b in zip(first, other, strict=True)) == 1 for other in around)
    assert found.sample(random.Random(5)) == found.sample(random.Random(5))


def after_each(counts: dict[int, int], n_tokens: int, depth: int) -> list[int]:
    return schedule_of(counts, n_tokens, any_size=False).counts(n_tokens, depth)


def test_the_families_hold_the_known_schedules() -> None:
    assert after_each(counts_at("geometric", 3, 11, 1, 0.8**9, 196), 196, 12) == Geometric(0.8).counts(196, 12)
    assert after_each(counts_at("geometric", 3, 9, 3, 0.125, 196), 196, 12) == Stages(0.5).counts(196, 12)
    assert after_each(counts_at("constant", 0, 11, 1, 1 - 12 * 14 / 196, 196), 196, 12) == Constant(14).counts(196, 12)
    # The one called linear takes away most at first and next to nothing at last; roundings differ.
    ours, known = counts_at("linear", 0, 11, 1, 10 / 196, 196), Linear(16).counts(196, 12)
    assert max(abs(a - b) for a, b in zip(ours.values(), known, strict=True)) <= 0.04 * 196


@settings(max_examples=100)
@given(
    st.sampled_from(["geometric", "constant", "linear"]),
    st.integers(0, 10),
    st.integers(0, 5),
    st.integers(1, 3),
    st.floats(0.005, 0.99),
    st.integers(4, 300),
)
def test_counts_fall_to_the_amount_and_fractions_leave_the_same(
    curve: str, start: int, length: int, stride: int, amount: float, n_tokens: int
) -> None:
    counts = counts_at(curve, start, start + length, stride, amount, n_tokens)
    left = list(counts.values())
    assert left == sorted(left, reverse=True) and left[-1] == max(1, int(n_tokens * amount + 1e-9))
    assert all(block in range(start, start + length + 1) for block in counts)
    if left[-1] == n_tokens:
        return
    fixed = schedule_of(counts, n_tokens, any_size=False)
    scaled = schedule_of(counts, n_tokens, any_size=True)
    assert fixed.counts(n_tokens, 16) == scaled.counts(n_tokens, 16)
    assert parse_schedule(str(fixed)) == fixed and parse_schedule(str(scaled)) == scaled


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="block 5 to block 3"):
        counts_at("geometric", 5, 3, 1, 0.5, 10)
    with pytest.raises(ValueError, match="all of 10 tokens"):
        schedule_of({0: 10}, 10, any_size=False)
