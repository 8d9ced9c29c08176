"""A clock that a test moves, so that no result depends on how busy the machine is."""

from __future__ import annotations

import pytest

from agglo.utils import timing


class Clock:
    """Stands still in place of the clock that passes are timed with, until it is moved on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        stopwatch = timing.stopwatch.__wrapped__  # type: ignore[attr-defined]  # the function that was decorated
        monkeypatch.setattr(stopwatch, "__defaults__", (timing.CPU, lambda: self.now))

    def advance(self, seconds: float) -> None:
        self.now += seconds
