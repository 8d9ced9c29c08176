"""Families of schedules, the latency staircase, and the model of time, without any clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.schedule import Constant, Geometric, Linear, Stages, parse_schedule
from agglo.tuning.solver import Latency, Timed, TimeModel, counts_to_time, steps_of
from agglo.tuning.space import counts_at, schedule_of


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
    with pytest.raises(ValueError, match="amount=0"):
        counts_at("geometric", 0, 3, 1, 0, 10)
    with pytest.raises(ValueError, match="block 5 to block 3"):
        counts_at("geometric", 5, 3, 1, 0.5, 10)
    with pytest.raises(ValueError, match="curve='cubic'"):
        counts_at("cubic", 0, 3, 1, 0.5, 10)
    with pytest.raises(ValueError, match="all of 10 tokens"):
        schedule_of({0: 10}, 10, any_size=False)


def table(seconds: dict[int, float], step: int, noise: float = 0.0) -> Latency:
    return Latency(tuple(seconds), tuple(seconds.values()), noise, step)


def test_on_a_staircase_counts_move_to_the_ends_of_the_stairs() -> None:
    # A class token and tiles of 16: 15, 31, 47 ... patches fill them.
    counts = counts_to_time(196, 1, 8)
    stairs = table({count: 1.0 + -(-(count + 1) // 16) for count in counts}, 16)
    for count in range(20, 190):
        moved = stairs.snap(count)
        assert abs(moved - count) <= 8
        assert stairs.above_trend(moved) <= stairs.above_trend(count)
    assert [stairs.snap(count) for count in (48, 64, 96, 112)] == [47, 63, 95, 111]
    assert [stairs.snap(count) for count in (47, 63, 95, 111)] == [47, 63, 95, 111]


def test_on_a_slope_and_in_noise_counts_stay() -> None:
    counts = counts_to_time(196, 1, 8)
    slope = table({count: 0.1 + 0.01 * count + 1e-5 * count**2 for count in counts}, 8, noise=1e-6)
    assert all(slope.snap(count) == count for count in range(1, 197))
    chance = np.random.default_rng(0)
    taken = {count: list((1 + count / 100) * chance.normal(1, 0.05, 3)) for count in counts}
    noisy = Latency.of(taken, 8)
    assert noisy.noise == pytest.approx(0.05 / 3**0.5, rel=0.3)
    assert sum(noisy.snap(count) != count for count in range(1, 197)) < 20


def test_what_is_timed_shows_the_stairs_of_any_number_of_tokens() -> None:
    assert len(counts_to_time(196, 1, 8)) <= 51 and counts_to_time(196, 1, 8)[-1] == 196
    assert steps_of(4096, 0)[0] == 256 and len(counts_to_time(4096, 0, 256)) <= 51
    assert len(counts_to_time(196, 1, 32)) < len(counts_to_time(196, 1, 16)) < len(counts_to_time(196, 1, 8))
    assert steps_of(3, 1) == [] and counts_to_time(3, 1, 8) == [3]


def test_time_is_learned_from_what_was_timed() -> None:
    def truth(gflops: float, pairs: float, traits: tuple[str, ...]) -> float:
        per_pair = {"atc": 0.03, "tome": 0.01, "atc linkage 1": 0.005}
        return 0.1 + 0.9 * gflops + pairs * sum(per_pair[trait] for trait in traits)

    ways = [(g, p, t) for g in (0.3, 0.6) for p in (1.0, 4.0) for t in (("atc",), ("tome",), ("atc", "atc linkage 1"))]
    model = TimeModel([Timed(*way, truth(*way)) for way in ways])
    assert model.predict(1.0, 0.0, ()) == pytest.approx(1.0, abs=1e-3)
    assert model.predict(0.45, 2.5, ("atc", "atc linkage 1")) == pytest.approx(
        truth(0.45, 2.5, ("atc", "atc linkage 1")), abs=1e-3
    )
    assert TimeModel(()).predict(0.5, 0.0, ()) == pytest.approx(0.5)


def test_a_few_timings_that_others_disturbed_do_not_matter() -> None:
    ways = [(g, p, t) for g in (0.3, 0.5, 0.75) for p in (2.0, 4.0) for t in (("atc",), ("tome",))]
    timed = [Timed(g, p, t, 0.05 + 0.95 * g + 0.02 * p) for g, p, t in ways]
    for number in (1, 6, 9):
        timed[number] = replace(timed[number], time=3 * timed[number].time)
    model = TimeModel(timed)
    assert model.predict(0.45, 3.0, ("atc",)) == pytest.approx(0.05 + 0.95 * 0.45 + 0.06, abs=0.01)


def test_no_method_is_predicted_to_be_faster_than_free() -> None:
    model = TimeModel([Timed(0.5, 0.0, (), 0.5), Timed(0.5, 4.0, ("atc",), 0.4), Timed(0.3, 4.0, ("atc",), 0.2)])
    assert model.predict(0.95, 9.0, ("atc",)) >= model.predict(0.95, 0.0, ())
