"""Successive halving: which candidates stay, on how many images, and which are added."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agglo.tuning.search import halving, rungs_of


@given(st.integers(1, 1000))
def test_rounds_double_up_to_all_images(images: int) -> None:
    rungs = rungs_of(images)
    assert rungs[0] == 1 and rungs[-1] == images and all(2 * a - b in (0, 1) for a, b in pairwise(rungs))


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


def test_what_has_no_value_is_out() -> None:
    found = halving("abcd", [1, 2], lambda candidates, images: {c: ord(c) for c in candidates if c != "a"})
    assert found == ["b", "c"]
    assert halving([], [1], lambda candidates, images: {}) == []
