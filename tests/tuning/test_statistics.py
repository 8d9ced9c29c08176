"""Distances and standard errors, against their definitions."""

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

from agglo.tuning.result import Drop, Quality
from agglo.tuning.subject import distances


def test_kl_is_that_of_the_softmax_outputs_from_the_dense_one() -> None:
    dense, reduced = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    expected = rel_entr(softmax(dense.numpy(), 1), softmax(reduced.numpy(), 1)).sum(1)
    np.testing.assert_allclose(distances("kl", dense, reduced), expected, rtol=1e-4)
    assert torch.equal(distances("kl", dense, dense), torch.zeros(5))
    half = distances("kl", dense.half(), reduced.half())
    assert half.dtype == torch.float32 and torch.allclose(half, torch.tensor(expected).float(), rtol=0.02)


def test_the_error_of_features_is_relative_and_averaged_over_outputs() -> None:
    dense = torch.randn(3, 4, 5)
    assert torch.allclose(distances("relative", dense, 1.5 * dense), torch.full((3,), 0.5))
    assert torch.equal(distances("relative", torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2))
    pyramid = [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)]
    found = distances("relative", pyramid, [pyramid[0], 2 * pyramid[1]])
    assert torch.allclose(found, torch.full((2,), 0.5))


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
    assert Drop.paired(30, 0, 100).within(10.0) is False
