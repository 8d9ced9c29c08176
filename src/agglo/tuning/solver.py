"""Candidates at a cost: the amount that meets it, the config that says so, and how long a reduced model takes.

With too few tokens to fill a tile or a vector, a kernel computes values that it throws away: one token more can cost
much, and one less nothing. `Latency` moves counts by up to half a step to where the device is faster than its trend.

`TimeModel` predicts well enough to start near a speed that is asked for; what is chosen in the end is always measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from agglo.config import ReductionConfig
from agglo.tuning.space import SCHEDULE_AXES, Candidate, NothingToReduceError, Space, counts_at, schedule_of
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Cost, Subject
from agglo.utils.timing import quartiles

_GUESSES = 14
_NEAR = 0.002  # of the dense model's cost: near enough below the level
_MODEST = 0.6  # an amount that every method reaches
_DIGITS = 4  # of a keep rate
_ALIGNED = 8  # tokens that the smallest tiles and vectors have in common
_FEWEST_STEPS, _MOST_STEPS = 4, 25
_SURE = 3.0  # standard errors by which two counts must differ
_LITTLE = 1e-6  # keeps the weight of what was never timed at zero
_EXACT = 1e-4  # deviations below it count alike
_ROUNDS = 50


@dataclass(frozen=True)
class Speed:
    """Times as fast as the dense model of the same turn; half of the turns lie between `low` and `high`."""

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Speed:
        """Return the speed of times relative to dense."""
        speeds = [1 / time for time in times]
        low, middle, high = quartiles(speeds)
        return cls(middle, low, high, len(speeds))


@dataclass(frozen=True)
class Point:
    """A candidate that is reduced so far: a config, and what it costs."""

    candidate: Candidate
    config: ReductionConfig
    cost: Cost


@dataclass(frozen=True)
class Measured:
    """A point, its quality on the images to search on, and its speed."""

    point: Point
    quality: Quality
    speed: Speed

    @property
    def distance(self) -> float:
        return self.quality.distance

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.point.config.method,
            "config": self.point.config.to_dict(),
            "counts": self.point.cost.counts,
            "gflops": self.point.cost.gflops,
            "speed": asdict(self.speed),
            "search": asdict(self.quality),
        }


class Solver:
    """Finds the amount at which a candidate costs what it may.

    Attributes:
        latency: Moves counts to where the device is fast; None leaves them.
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
        """Take the speeds of points into account."""
        timed = zip(points, speeds, strict=True)
        self.learn([Timed(p.cost.gflops, p.cost.pairs, self._traits(p), 1 / speed.median) for p, speed in timed])

    def predicted(self, point: Point) -> float:
        """Return what is compared with a level: time or GFLOPs, relative to dense."""
        if not self.by_time:
            return point.cost.gflops
        return self._model.predict(point.cost.gflops, point.cost.pairs, self._traits(point))

    def _traits(self, point: Point) -> tuple[str, ...]:
        return self.spaces[point.config.method].traits(point.candidate)

    def at(self, candidate: Candidate, amount: float) -> Point:
        """Return the candidate with an amount, the fraction of tokens that is left; ValueError if it cannot run so."""
        values = self.spaces[candidate.method].values(candidate)
        family = {name: values.pop(name) for name in SCHEDULE_AXES if name in values}
        budget: dict[str, Any] = {"keep_rate": round(amount, _DIGITS)}
        if family:
            counts = counts_at(**family, amount=amount, n_tokens=self.subject.tokens)
            snap = (lambda count: count) if self.latency is None else self.latency.snap
            budget = {"schedule": schedule_of(counts, self.subject.tokens, any_size=self.subject.any_size, snap=snap)}
        config = ReductionConfig.of(**values, **budget)
        return Point(candidate, config, self.subject.cost(config))

    def solve(self, candidate: Candidate, level: float, *, by_gflops: bool = False) -> Point:
        """Return the candidate with as many tokens as the level allows.

        The amount lies between one that costs too much and one that does not, and is guessed where a straight line
        between the two meets the level: costs are nearly linear in it.

        Args:
            candidate: What is reduced.
            level: What it may cost, relative to dense.
            by_gflops: Whether the level is one of GFLOPs where candidates are otherwise compared by time.

        Raises:
            ValueError: There is no such amount.
        """
        guess = _MODEST
        self.at(candidate, guess)  # what fails here is not the amount's fault
        found: Point | None = None
        low, high, cost_of_low, cost_of_high = 0.0, 1.0, math.nan, 1.0
        least = math.inf
        for _ in range(_GUESSES):
            try:
                point = self.at(candidate, guess)
                cost = point.cost.gflops if by_gflops else self.predicted(point)
                least = min(least, cost)
                if cost <= level:
                    found, low, cost_of_low = point, guess, cost
                else:
                    high, cost_of_high = guess, cost
            except NothingToReduceError:
                high, cost_of_high = guess, 1.0
            except ValueError:  # out of the method's reach: more must stay
                low, cost_of_low = guess, math.nan
            if (found is not None and level - cost_of_low < _NEAR) or high - low < 0.5 / self.subject.tokens:
                break
            share = (level - cost_of_low) / (cost_of_high - cost_of_low) if cost_of_high > cost_of_low else 0.5
            # Away from the ends, which would be guessed again and again where costs are steps.
            guess = low + (high - low) * min(0.9, max(0.1, share))
        if found is None:
            raise ValueError(f"it costs {least:.2f} of the dense model at the least, and {level:.2f} was asked for")
        return found


def counts_to_time(n_tokens: int, prefix: int, step: int) -> list[int]:
    """Return the patch counts that show a staircase, rising.

    These are the counts with which all tokens, prefix included, are a multiple of the step, those with one token more,
    and n_tokens.

    >>> counts_to_time(36, 1, 8)
    [7, 8, 15, 16, 23, 24, 31, 32, 36]
    """
    ends = range(step - prefix % step, n_tokens + 1, step)
    counts = {count for end in ends for count in (end, end + 1) if 1 <= count <= n_tokens}
    return sorted({*counts, n_tokens})


def steps_of(n_tokens: int, prefix: int) -> list[int]:
    """Return the steps between aligned counts that can be measured and still show stairs, rising.

    >>> steps_of(196, 1), steps_of(4096, 0), steps_of(9, 0)
    ([8, 16, 32], [256, 512, 1024], [])
    """
    steps = [_ALIGNED * 2**power for power in range((n_tokens + prefix).bit_length())]
    return [step for step in steps if _FEWEST_STEPS <= (n_tokens + prefix) // step <= _MOST_STEPS]


@dataclass(frozen=True)
class Latency:
    """Time of a pass by the number of patch tokens that all blocks have."""

    counts: tuple[int, ...]  # rising
    seconds: tuple[float, ...]  # relative to dense
    noise: float  # relative standard error of a time
    step: int  # between aligned counts; counts move by at most half of it

    @classmethod
    def of(cls, taken: Mapping[int, Sequence[float]], step: int) -> Latency:
        """Make a table from the times of two turns or more at each count."""
        counts = tuple(sorted(taken))
        medians = [float(np.median(taken[count])) for count in counts]
        # Turns of one count differ by chance alone: the standard error of the mean of one count, by those of all.
        variances = [np.var(taken[count], ddof=1) / np.mean(taken[count]) ** 2 for count in counts]
        noise = float(np.sqrt(np.mean(variances) / len(taken[counts[0]])))
        return cls(counts, tuple(medians), noise, step)

    @cached_property
    def _above(self) -> list[float]:
        trend = np.polynomial.Polynomial.fit(self.counts, self.seconds, deg=min(2, len(self.counts) - 1))
        return [seconds / float(trend(count)) - 1 for count, seconds in zip(self.counts, self.seconds, strict=True)]

    def above_trend(self, count: int) -> float:
        """Return how much longer than the trend a count takes, as a fraction of it, interpolated between timed counts.

        The trend is a parabola, since attention is quadratic and all else is linear.
        """
        return float(np.interp(count, self.counts, self._above))

    def snap(self, count: int) -> int:
        """Return the count nearby at which the device is fastest for its trend, if that is more than noise.

        Nearby is within half a step, and within an eighth of the count, so that few tokens do not become far fewer.
        """
        near = [other for other in self.counts if abs(other - count) <= min(self.step / 2, count / 8)]
        if not near:
            return count
        best = min(near, key=lambda other: (self.above_trend(other), abs(other - count)))
        return best if self.above_trend(count) - self.above_trend(best) > _SURE * self.noise else count


@dataclass(frozen=True)
class Timed:
    """A config that was timed; GFLOPs and time are relative to dense."""

    gflops: float
    pairs: float  # of tokens that a method may compare: sum over reductions of (tokens before / all tokens) squared
    traits: tuple[str, ...]  # the method, and each of its options that is not the first of its axis
    time: float


class TimeModel:
    """A linear model of time relative to the dense model, which it meets exactly.

    Time is 1 - b (1 - gflops) + pairs * (the sum of a weight for each trait), where the last term is at least 0. The
    fit has least absolute deviations: where other processes use the machine, a few timings are far off, and least
    squares would follow them.
    """

    def __init__(self, timed: Sequence[Timed]) -> None:
        self._traits = sorted({trait for each in timed for trait in each.traits})
        self._weights = np.ones(1)  # before anything was timed, time falls as GFLOPs do
        if timed:
            rows = np.array([self._row(each.gflops, each.pairs, each.traits) for each in timed])
            self._weights = _least_deviations(rows, np.array([each.time - 1.0 for each in timed]))

    def predict(self, gflops: float, pairs: float, traits: Sequence[str]) -> float:
        """Return the time relative to the dense model's."""
        free, *method = self._row(gflops, pairs, traits) * self._weights
        return float(1.0 + free + max(0.0, sum(method)))

    def _row(self, gflops: float, pairs: float, traits: Sequence[str]) -> np.ndarray:
        return np.array([gflops - 1.0, *(pairs * (trait in traits) for trait in self._traits)])


def _least_deviations(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the weights of least absolute deviations, by iteratively reweighted least squares."""
    little = _LITTLE * np.eye(rows.shape[1])
    trust = np.ones(len(rows))
    for _ in range(_ROUNDS):
        weighted = rows * trust[:, None]
        weights = np.linalg.solve(weighted.T @ rows + little, weighted.T @ values)
        trust = _EXACT / np.maximum(np.abs(rows @ weights - values), _EXACT)
    return weights
