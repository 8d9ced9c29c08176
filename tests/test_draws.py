"""Tests draw the same random numbers in every run, in whatever order they run."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def expected(name: str) -> list[float]:
    number = zlib.crc32(name.encode())
    own = torch.Generator().manual_seed(number)
    return [random.Random(number).random(), np.random.RandomState(number).rand(), float(torch.rand((), generator=own))]


@pytest.fixture(scope="module")
def shared() -> list[float]:
    return draws()


@pytest.mark.parametrize("order", ["first", "second"])
def test_draws_depend_on_the_test_alone(order: str, shared: list[float], request: pytest.FixtureRequest) -> None:
    assert shared == expected("shared")
    assert draws() == expected(request.node.nodeid)


def test_hypothesis_draws_the_same_and_looks_at_no_clock() -> None:
    assert settings.default.derandomize and settings.default.deadline is None
