"""The Frechet distance against its closed forms and against other computations of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agglo.lab.tasks.synthesis.evaluation.fid import FewImagesWarning, Statistics, frechet_distance

linalg = pytest.importorskip("scipy.linalg")


def statistics(seed: int, count: int, dimensions: int, scale: float = 1.0, shift: float = 0.0) -> Statistics:
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((dimensions, dimensions))
    return Statistics.of(scale * random.standard_normal((count, dimensions)) @ mixing + shift)


def quietly(a: Statistics, b: Statistics) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewImagesWarning)
        return frechet_distance(a, b)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.0, 4), st.floats(0.0, 4))
def test_of_two_numbers(m1: float, m2: float, s1: float, s2: float) -> None:
    a = Statistics(None, np.array([m1]), np.array([[s1**2]]))
    b = Statistics(None, np.array([m2]), np.array([[s2**2]]))
    assert frechet_distance(a, b) == pytest.approx((m1 - m2) ** 2 + (s1 - s2) ** 2, abs=1e-9)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(2, 24), st.floats(0.1, 3), st.floats(-2, 2))
def test_as_scipy_and_torchmetrics_compute_it(seed: int, dimensions: int, scale: float, shift: float) -> None:
    a = statistics(seed, 3 * dimensions, dimensions)
    b = statistics(seed + 1, 2 * dimensions + 1, dimensions, scale, shift)
    root = linalg.sqrtm(a.covariance @ b.covariance).real
    apart = a.mean - b.mean
    expected = apart @ apart + np.trace(a.covariance + b.covariance - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    torch = pytest.importorskip("torch")
    fid = pytest.importorskip("torchmetrics.image.fid")
    theirs = fid._compute_fid(*(torch.from_numpy(x) for x in (a.mean, a.covariance, b.mean, b.covariance)))
    assert frechet_distance(a, b) == pytest.approx(float(theirs), rel=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(2, 30), st.integers(2, 30))
def test_what_any_distance_does(seed: int, dimensions: int, n_a: int, n_b: int) -> None:
    a, b = statistics(seed, n_a, dimensions), statistics(seed + 1, n_b, dimensions, 2.0)
    distance = quietly(a, b)
    size = np.trace(a.covariance) + np.trace(b.covariance)
    assert distance == pytest.approx(quietly(b, a), rel=1e-8, abs=1e-8 * size)
    assert distance >= -1e-8 * size
    assert quietly(a, a) == pytest.approx(0, abs=1e-7 * size)
    # The root of the distance is a metric: of means and of the roots of covariances.
    c = statistics(seed + 2, n_a, dimensions, 0.5, 1.0)
    assert quietly(a, c) ** 0.5 <= max(0, distance) ** 0.5 + max(0, quietly(b, c)) ** 0.5 + 1e-3


def test_fewer_images_than_features_are_told_with_their_number() -> None:
    few, many = statistics(0, 5, 8), statistics(1, 100, 8)
    with pytest.warns(FewImagesWarning, match="5 images for 8 features"):
        distance = frechet_distance(few, many)
    # Exact all the same: the nonzero eigenvalues of S1 S2 by another way.
    values = np.linalg.eigvals(few.covariance @ many.covariance)
    apart = few.mean - many.mean
    overlap = np.sqrt(values.real.clip(min=0)).sum()
    expected = apart @ apart + np.trace(few.covariance) + np.trace(many.covariance) - 2 * overlap
    assert distance == pytest.approx(expected, rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frechet_distance(many, many)


def test_statistics_in_a_file(tmp_path: Path) -> None:
    found = statistics(0, 50, 3)
    found.save(tmp_path / "some.npz")
    again = Statistics.load(tmp_path / "some.npz")
    assert again.count == 50
    assert np.array_equal(again.mean, found.mean) and np.array_equal(again.covariance, found.covariance)
    np.savez(tmp_path / "theirs.npz", mu=found.mean, sigma=found.covariance)
    assert Statistics.load(tmp_path / "theirs.npz").count is None
    np.savez(tmp_path / "other.npz", mu=found.mean)
    with pytest.raises(ValueError, match=r"holds no statistics"):
        Statistics.load(tmp_path / "other.npz")
    np.savez(tmp_path / "odd.npz", mu=found.mean, sigma=found.covariance[:2])
    with pytest.raises(ValueError, match=r"sigma \(2, 3\)"):
        Statistics.load(tmp_path / "odd.npz")


def test_wrong_features_are_told() -> None:
    with pytest.raises(ValueError, match="at least 2 images"):
        Statistics.of(np.zeros((1, 4)))
    with pytest.raises(ValueError, match="no finite numbers"):
        Statistics.of(np.full((3, 4), np.nan))
    with pytest.raises(ValueError, match="features of 3 and of 4"):
        frechet_distance(statistics(0, 9, 3), statistics(0, 9, 4))
