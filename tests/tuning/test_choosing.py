"""A speed is met by the nearest point to dense that is measured to be fast enough, of finalists and the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from agglo.config import ReductionConfig
from agglo.tuning.choosing import choose, winner
from agglo.tuning.settings import Target
from agglo.tuning.solver import Measured, Point, Speed
from agglo.tuning.space import Candidate
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Cost

RATES = {"finalist": 0.5, "near": 0.6, "slow": 0.7, "far": 0.4}


def point(name: str) -> Point:
    return Point(Candidate("atc", (0,)), ReductionConfig(keep_rate=RATES[name]), Cost(0.5, [98], 0.0))


def name_of(found: Point) -> str:
    return next(name for name, rate in RATES.items() if rate == found.config.keep_rate)


def measured(name: str, speed: float, distance: float) -> Measured:
    return Measured(point(name), Quality(1, distance, distance**2), Speed(speed, speed, speed, 4))


@dataclass
class Search:
    """Finalists are solved to one point. known: speed and distance of every point when it is timed."""

    known: dict[str, tuple[float, float]]
    target: Target = field(default_factory=lambda: Target("speedup", 2.0))
    timed: list[tuple[str, list[str]]] = field(default_factory=list)
    solver: Any = field(default_factory=lambda: SimpleNamespace(predicted=lambda point: 0.5))

    def solved(self, candidate: Candidate, level: float) -> Point:
        return point("finalist")

    def measured(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Measured]:
        names = [name_of(each) for each in points]
        self.timed.append((purpose, names))
        return [measured(name, *self.known[name]) for name in names]


def chosen(search: Search, front: list[Measured]) -> str:
    found = choose(search, {"atc": [Candidate("atc", (0,))]}, front)  # type: ignore[arg-type]
    return name_of(winner(search, found).point)  # type: ignore[arg-type]


FINALIST = {"finalist": (2.02, 0.15)}


def test_a_point_of_the_front_that_is_nearer_and_as_fast_is_the_answer() -> None:
    search = Search({**FINALIST, "near": (2.01, 0.12)})
    assert (
        chosen(search, [measured("near", 2.1, 0.12), measured("slow", 1.5, 0.01), measured("far", 2.5, 0.3)]) == "near"
    )
    assert search.timed[-1] == ("finalists and front", ["finalist", "near"]), "only what could be better is timed again"


def test_one_that_was_fast_by_chance_is_not() -> None:
    search = Search({**FINALIST, "near": (1.9, 0.12)})
    assert chosen(search, [measured("near", 2.3, 0.12)]) == "finalist"


def test_a_front_that_is_no_better_is_not_timed_again() -> None:
    search = Search(FINALIST)
    assert chosen(search, [measured("far", 2.5, 0.3)]) == "finalist"
    assert all(purpose.startswith("finalists ") and names == ["finalist"] for purpose, names in search.timed)


@pytest.mark.parametrize(("again", "answer"), [(2.05, "near"), (1.9, "finalist")])
def test_finalists_that_are_too_slow(again: float, answer: str) -> None:
    search = Search({"finalist": (1.8, 0.1), "near": (again, 0.2)})
    assert chosen(search, [measured("near", 2.1, 0.2)]) == answer
