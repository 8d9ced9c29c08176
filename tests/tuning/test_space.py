"""The space holds only what a method, `ReductionConfig` and the model accept; its schedules hold the known ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agglo.budget import recipe_options, recipe_schedule
from agglo.config import ReductionConfig
from agglo.schedule import Constant, Geometric, Linear, Stages, as_schedule
from agglo.tuning import space as searched
from agglo.tuning.space import Space, schedule_of, space_of


def make(method: str = "atc", depth: int | None = 12, refuse: dict[str, Any] | None = None) -> Space:
    def tries(config: ReductionConfig) -> None:
        assert config.method == method
        if refuse and refuse.items() <= config.given().items():
            raise ValueError("not this one")

    return space_of(method, depth=depth, tries=tries)


def test_options_that_are_unknown_or_refused_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    linkages = ({"linkage": "single"}, {"linkage": "complete"})
    monkeypatch.setattr(searched, "OPTIONS", {"atc": {"linkage": linkages, "magic": ({"magic": 1}, {"magic": 2})}})
    monkeypatch.setattr(searched, "EXACT", {"unheard": "of"})
    found = make()
    options = {name: values for name, values in found.axes.items() if name not in searched.SCHEDULE_AXES}
    assert options == {"linkage": linkages, "place": searched.PLACE}
    assert found.always == {}
    found = make(refuse={"linkage": "complete"})
    assert found.axes["linkage"] == linkages[:1]


def test_a_diffusion_model_has_options_alone_and_a_method_without_a_table_schedules_alone() -> None:
    found = make("tomesd", depth=None)
    assert list(found.axes) == ["features"]
    assert found.config((1,), 0.25) == ReductionConfig("tomesd", keep_rate=0.25, options={"features": "keys"})
    assert set(make("pool").axes) == {"place", *searched.SCHEDULE_AXES}


def test_the_first_candidate_its_neighbours_and_random_ones_are_proposed() -> None:
    found = make("tome")
    proposed = found.propose(30, seed=5)
    near = 1 + sum(len(values) - 1 for values in found.axes.values())
    assert proposed[0] == found.first and len(proposed) == len(set(proposed)) > near
    assert all(sum(pick != 0 for pick in other) == 1 for other in proposed[1:near])
    assert proposed == found.propose(30, seed=5) != found.propose(30, seed=6)


@pytest.mark.parametrize("depth", [4, 12, 24])
def test_the_search_begins_with_the_recipe(depth: int) -> None:
    found = make(depth=depth)
    schedule = recipe_schedule(depth, 0.5, 0.2)
    assert found.config(found.first, 0.2) == ReductionConfig.of("atc", **recipe_options("atc", True), schedule=schedule)


def test_the_families_hold_the_known_schedules() -> None:
    assert schedule_of("geometric", 3, 11, 1, 0.8**9).counts(196, 12) == Geometric(0.8).counts(196, 12)
    assert schedule_of("geometric", 3, 9, 3, 0.125).counts(196, 12) == Stages(0.5).counts(196, 12)
    for curve, ours, known in (("constant", 28 / 196, Constant(14)), ("linear", 10 / 196, Linear(16))):
        pairs = zip(schedule_of(curve, 0, 11, 1, ours).counts(196, 12), known.counts(196, 12), strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 0.04 * 196  # roundings differ


@given(
    st.sampled_from(["geometric", "constant", "linear"]),
    st.integers(0, 10),
    st.integers(0, 5),
    st.integers(1, 3),
    st.floats(0.02, 0.99),
)
def test_tokens_fall_to_the_amount(curve: str, start: int, length: int, stride: int, amount: float) -> None:
    schedule = schedule_of(curve, start, start + length, stride, amount)
    left = schedule.counts(1000, 16)
    assert left[:start] == [1000] * start and left[-1] == pytest.approx(1000 * amount, abs=2)
    assert as_schedule(str(schedule)) == schedule
