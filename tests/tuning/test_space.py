"""The space holds only what a method and `ReductionConfig` accept, and what the model accepts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agglo.config import ReductionConfig
from agglo.tuning import space as searched
from agglo.tuning.space import Candidate, Space, space_of


def make(method: str = "atc", depth: int | None = 12, refuse: dict[str, Any] | None = None) -> Space:
    def tries(config: ReductionConfig) -> None:
        assert config.method == method
        if refuse and refuse.items() <= config.given().items():
            raise ValueError("not this one")

    return space_of(method, depth=depth, tries=tries)


def test_options_that_nobody_accepts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    linkages = ({"linkage": "single"}, {"linkage": "complete"})
    monkeypatch.setattr(searched, "OPTIONS", {"atc": {"linkage": linkages, "magic": ({"magic": 1}, {"magic": 2})}})
    monkeypatch.setattr(searched, "PLACES", {"attention": ({}, {"proportional": False}, {"nowhere": 1})})
    monkeypatch.setattr(searched, "EXACT", ({"unheard": "of"},))
    found = make()
    values = {axis.name: axis.values for axis in found.axes if axis.name not in searched.SCHEDULE_AXES}
    assert values == {"linkage": linkages, "attention": ({}, {"proportional": False})}
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


def test_neighbours_differ_in_one_axis_and_mutants_in_one_or_two() -> None:
    found = make("tome")
    first = found.first()
    around = found.around(first)
    assert len(around) == sum(len(axis.values) - 1 for axis in found.axes) == len(set(around))

    def differing(other: Candidate) -> list[int]:
        return [n for n, (a, b) in enumerate(zip(first.picks, other.picks, strict=True)) if a != b]

    assert all(len(differing(other)) == 1 for other in around)
    chance = random.Random(0)
    for _ in range(200):
        mutant = found.mutant(first, chance)
        assert len(differing(mutant)) in (1, 2)
        for number in differing(mutant):
            if found.axes[number].ordered:
                assert abs(mutant.picks[number] - first.picks[number]) == 1
    drawn = [found.sample(random.Random(5)) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_space_of_one_point_has_no_mutants() -> None:
    alone = Space("tome", (), {})
    assert alone.mutant(alone.first(), random.Random(0)) == alone.first() and alone.size == 1
