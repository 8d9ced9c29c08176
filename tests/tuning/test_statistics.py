"""Distances, standard errors and fronts, against their definitions."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from scipy.stats import sem

from agglo.tuning.choosing import allowed_distance
from agglo.tuning.objectives import cosine, kl, objective_named, relative
from agglo.tuning.statistics import Drop, Quality, pareto


def test_kl_is_that_of_the_softmax_outputs_from_the_dense_one() -> None:
    dense, reduced = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    expected = rel_entr(softmax(dense.numpy(), 1), softmax(reduced.numpy(), 1)).sum(1)
    np.testing.assert_allclose(kl(dense, reduced), expected, rtol=1e-4)
    assert torch.equal(kl(dense, dense), torch.zeros(5))
    half = kl(dense.half(), reduced.half())
    assert half.dtype == torch.float32 and torch.allclose(half, torch.tensor(expected).float(), rtol=0.02)


def test_dense_features_are_compared_by_length_or_direction() -> None:
    dense = torch.randn(3, 4, 5)
    assert torch.allclose(relative(dense, 1.5 * dense), torch.full((3,), 0.5))
    assert torch.allclose(cosine(dense, 1.5 * dense), torch.zeros(3), atol=1e-6)
    assert torch.allclose(cosine(dense, -dense), torch.full((3,), 2.0))
    assert torch.equal(relative(torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2))


def test_several_outputs_are_averaged_and_images_stay_apart() -> None:
    pyramid = [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)]
    found = objective_named("relative")(pyramid, [pyramid[0], 2 * pyramid[1]])
    assert torch.allclose(found, torch.full((2,), 0.5))
    with pytest.raises(ValueError, match="objective='l2'"):
        objective_named("l2")


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=2, max_size=30), st.integers(1, 29))
def test_sums_of_parts_give_the_mean_and_error_of_all(values: list[float], cut: int) -> None:
    def of(part: list[float]) -> Quality:
        return Quality(len(part), sum(part), sum(value**2 for value in part))

    cut = min(cut, len(values) - 1)
    found = of(values[:cut]) + of(values[cut:])
    assert found.distance == pytest.approx(np.mean(values))
    assert found.distance_error == pytest.approx(sem(values), abs=1e-6)
    assert found.drop is None and found.disagreement is None
    assert Quality(**asdict(found)) == found


@settings(max_examples=50)
@given(st.lists(st.sampled_from([-1, 0, 0, 0, 1]), min_size=4, max_size=200))
def test_a_drop_is_the_mean_of_paired_differences(differences: list[int]) -> None:
    lost, gained = differences.count(1), differences.count(-1)
    found = Drop.paired(lost, gained, len(differences))
    assert found.points == pytest.approx(100 * np.mean(differences))
    error = 100 * np.std(differences) / math.sqrt(len(differences))
    least = 100 * np.std([1] + [0] * (len(differences) - 1)) / math.sqrt(len(differences))
    assert found.error == pytest.approx(max(error, least))


def test_images_on_which_nothing_changed_do_not_promise_everything() -> None:
    found = Drop.paired(0, 0, 100)
    assert found.points == 0 and found.within(1.0) is None and found.within(2.1) is True
    needed = found.images_needed(1.0)
    assert needed is not None and 100 < needed < 500


@given(st.integers(0, 40), st.integers(0, 40), st.floats(0.05, 20))
def test_so_many_images_would_settle_it(lost: int, gained: int, most: float) -> None:
    found = Drop.paired(lost, gained, 400)
    needed = found.images_needed(most)
    if found.points >= most:
        assert needed is None and found.within(most) is not True
        return
    assert needed is not None
    with_more = Drop(found.points, found.error * math.sqrt(400 / needed), needed)
    assert with_more.points + 2 * with_more.error <= most * (1 + 1e-9)
    assert (needed <= 400) == (found.within(most) is True)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=25))
def test_the_front_is_what_nobody_dominates(points: list[tuple[int, int]]) -> None:
    def dominates(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] >= other[0] and one[1] <= other[1]

    brute = {point for point in points if not any(dominates(other, point) for other in points)}
    found = pareto(points, gain=lambda point: point[0], loss=lambda point: point[1])
    assert found == sorted(brute)


def test_the_allowed_distance_comes_from_all_points_together() -> None:
    # 20 points of accuracy per unit of distance, with noise that averages out.
    qualities = [Quality(1000, 1000 * d, 0.0, 50, int(200 * d + noise), 0) for d, noise in ((0.5, 4), (1.0, -2))]
    assert allowed_distance(qualities, 1.0) == pytest.approx(0.05, rel=0.02)
    without = [Quality(1000, 1000 * d, 0.0, round(100 * math.sqrt(d))) for d in (0.25, 1.0)]
    assert allowed_distance(without, 1.0) == pytest.approx(0.01)
    assert allowed_distance([Quality(1000, 10.0, 1.0, 0, 0, 3)], 1.0) == math.inf
    rounded_below_zero = Quality(12, -7e-8, 1e-14, 0)
    assert allowed_distance([*without, rounded_below_zero], 1.0) == pytest.approx(0.01)
