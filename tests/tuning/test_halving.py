"""Successive halving: which candidates stay, on how many images, and which are added."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agglo.tuning.search import halving, rungs_of


@given(st.integers(1, 1000), st.integers(1, 64))
def test_rounds_double_up_to_all_images(images: int, least: int) -> None:
    rungs = rungs_of(images, least)
    assert rungs[-1] == images and all(2 * a - b in (0, 1) for a, b in pairwise(rungs))
    assert len(rungs) == 1 or rungs[0] >= least


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True))
def test_without_noise_the_best_half_stays_and_the_best_comes_first(values: list[int]) -> None:
    seen: list[tuple[list[int], int]] = []

    def evaluate(candidates: Sequence[int], images: int) -> dict[int, float]:
        seen.append((list(candidates), images))
        return {candidate: candidate for candidate in candidates}

    found = halving(values, [1, 2, 4], evaluate)
    assert found[0] == min(values) and found == sorted(found)
    assert [images for _, images in seen] == [1, 2, 4]
    for (before, _), (after, _) in pairwise(seen):
        assert after == sorted(before)[: max(2, -(-len(before) // 2))]


def test_noise_that_falls_with_images_seldom_loses_a_good_one() -> None:
    ranks = []
    for seed in range(40):
        chance = random.Random(seed)

        def evaluate(candidates: Sequence[int], images: int, chance: random.Random = chance) -> dict[int, float]:
            return {candidate: candidate + chance.gauss(0, 12 / images**0.5) for candidate in candidates}

        ranks.append(halving(range(64), [1, 4, 16, 64], evaluate)[0])
    assert sum(ranks) / len(ranks) < 5  # of 64; chance alone would give 31.5


def test_the_born_take_the_last_places_and_are_compared_on_the_same_images() -> None:
    rounds: list[list[int]] = []

    def evaluate(candidates: Sequence[int], images: int) -> dict[int, float]:
        rounds.append(list(candidates))
        return {candidate: abs(candidate - 100) for candidate in candidates}

    def breed(best: Sequence[int], count: int) -> list[int]:
        return [best[0] + 1, best[0] + 2][:count]

    found = halving(range(12), [1, 2], evaluate, breed)
    assert rounds[1] == [11, 10, 9, 8, 12, 13]
    assert found[0] == 13


def test_what_has_no_value_is_out() -> None:
    found = halving("abcd", [1, 2], lambda candidates, images: {c: ord(c) for c in candidates if c != "a"})
    assert found == ["b", "c"]
    assert halving([], [1], lambda candidates, images: {}) == []


def test_a_candidate_counts_once() -> None:
    calls: list[int] = []
    halving([3, 3, 1], [1], lambda candidates, images: calls.extend(candidates) or dict.fromkeys(candidates, 0.0))  # type: ignore[func-returns-value]
    assert sorted(calls) == [1, 3]


def test_rungs_need_an_image() -> None:
    assert rungs_of(1, 1) == [1]
    assert rungs_of(7, 1) == [1, 2, 4, 7]
    assert pytest.approx(rungs_of(512, 32)) == [32, 64, 128, 256, 512]
