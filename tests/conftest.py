"""What holds for every test: its draws do not depend on what ran before it, nor its result on a clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.draws import seed, seeded

# Some virtual machines announce AMX and end in an illegal instruction when oneDNN uses it for bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
settings.register_profile("agglo", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agglo")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """What several tests share is made by whichever comes first, and must not depend on which that is."""
    if fixturedef.scope == "function":
        return (yield)
    with seeded(fixturedef.argname):
        return (yield)
