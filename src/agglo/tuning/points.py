"""Candidates as points: with an amount that meets a cost, what they say to `agglo.apply`, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from agglo.tuning.latency import Latency
from agglo.tuning.schedules import NothingToReduceError, counts_at, schedule_of
from agglo.tuning.space import Candidate, Space
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Cost, Subject
from agglo.tuning.time_model import Timed, TimeModel

_GUESSES = 14
_CLOSE = 0.002  # of the dense model's cost: near enough below the level
_MODEST = 0.6  # an amount that every method reaches
_DIGITS = 4  # of a keep rate


@dataclass(frozen=True)
class Speed:
    """Times as fast as the dense model of the same turn. low, high: half of the turns lie between."""

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Speed:
        """From times relative to dense."""
        speeds = [1 / time for time in times]
        low, _, high = quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
        return cls(median(speeds), low, high, len(speeds))


@dataclass(frozen=True)
class Point:
    """A candidate with its amount. arguments: of `agglo.apply`."""

    candidate: Candidate
    amount: float
    arguments: dict[str, Any] = field(compare=False)
    cost: Cost = field(compare=False)

    @property
    def method(self) -> str:
        return self.candidate.method


@dataclass(frozen=True)
class Measured:
    """A point, its quality on the images to search on, and its speed."""

    point: Point
    quality: Quality
    speed: Speed


class Solver:
    """Finds the amount at which a candidate costs what it may.

    latency: moves counts to where the device is fast; None leaves them.
    """

    def __init__(self, subject: Subject, spaces: Mapping[str, Space], *, by_time: bool) -> None:
        self.subject, self.spaces, self.by_time = subject, spaces, by_time
        self.latency: Latency | None = None
        self._timed: list[Timed] = []
        self._model = TimeModel(())

    def learn(self, timed: Sequence[Timed]) -> None:
        """Take more timings into account."""
        self._timed += timed
        self._model = TimeModel(self._timed)

    def learn_from(self, points: Sequence[Point], speeds: Sequence[Speed]) -> None:
        self.learn(
            [
                Timed(point.cost.gflops, point.cost.pairs, self.traits(point.candidate), 1 / speed.median)
                for point, speed in zip(points, speeds, strict=True)
            ]
        )

    def predicted(self, point: Point) -> float:
        """What is held against a level: time or GFLOPs, relative to dense."""
        return self._held(point.candidate, point.cost)

    def _held(self, candidate: Candidate, cost: Cost) -> float:
        if not self.by_time:
            return cost.gflops
        return self._model.predict(cost.gflops, cost.pairs, self.traits(candidate))

    def traits(self, candidate: Candidate) -> tuple[str, ...]:
        """The method, and each option that is not the first of its axis; where tokens go is known by the counts."""
        space = self.spaces[candidate.method]
        chosen = [
            f"{space.method} {axis.name} {pick}"
            for axis, pick in zip(space.axes, candidate.picks, strict=True)
            if pick != axis.first and axis.name not in ("start", "last", "curve", "stride")
        ]
        return (space.method, *chosen)

    def at(self, candidate: Candidate, amount: float) -> Point:
        """The candidate with an amount; ValueError where it cannot be applied."""
        values = self.spaces[candidate.method].values(candidate)
        if self.subject.depth is None:
            arguments = {**values, "keep_rate": round(amount, _DIGITS)}
        else:
            shape = {name: values.pop(name) for name in ("curve", "start", "last", "stride")}
            counts = counts_at(**shape, amount=amount, n_tokens=self.subject.tokens)
            snap = (lambda count: count) if self.latency is None else self.latency.snap
            schedule = schedule_of(counts, self.subject.tokens, any_size=self.subject.any_size, snap=snap)
            arguments = {**values, "schedule": str(schedule)}
        return Point(candidate, amount, arguments, self.subject.cost(arguments))

    def solve(self, candidate: Candidate, level: float) -> Point:
        """As many tokens as the level allows; ValueError says why there is no such amount."""
        return self.solve_by(candidate, level, lambda cost: self._held(candidate, cost))

    def solve_by(self, candidate: Candidate, level: float, held: Callable[[Cost], float]) -> Point:
        """The amount is found between one that costs too much and one that does not, where a straight line between the
        two would meet the level: costs are nearly linear in it."""
        guess = _MODEST
        self.at(candidate, guess)  # what fails here is not the amount's fault
        found: Point | None = None
        low, high, cost_of_low, cost_of_high = 0.0, 1.0, math.nan, 1.0
        least = math.inf
        for _ in range(_GUESSES):
            try:
                point = self.at(candidate, guess)
                cost = held(point.cost)
                least = min(least, cost)
                if cost <= level:
                    found, low, cost_of_low = point, guess, cost
                else:
                    high, cost_of_high = guess, cost
            except NothingToReduceError:
                high, cost_of_high = guess, 1.0
            except ValueError:  # out of the method's reach: more must stay
                low, cost_of_low = guess, math.nan
            if (found is not None and level - cost_of_low < _CLOSE) or high - low < 0.5 / self.subject.tokens:
                break
            share = (level - cost_of_low) / (cost_of_high - cost_of_low) if cost_of_high > cost_of_low else 0.5
            # Away from the ends, which would be guessed again and again where costs are steps.
            guess = low + (high - low) * min(0.9, max(0.1, share))
        if found is None:
            raise ValueError(f"it costs {least:.2f} of the dense model at the least, and {level:.2f} was asked for")
        return found
