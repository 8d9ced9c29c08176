"""The search: halve the candidates of each method at one cost, follow the best along the front, choose what fits.

All candidates of a round cost the same GFLOPs and differ only in what they keep of the output. Where a speed or an
accuracy is asked for, a few timings of each method say which GFLOPs that speed takes; what is chosen is timed again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Any, TypeVar

from agglo.config import ReductionConfig
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.tuning.settings import Target, TuneSettings
from agglo.tuning.space import SCHEDULE_AXES, Candidate, NothingToReduceError, Space, counts_at, schedule_of
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Cost, Subject
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.randomness import derived_seed
from agglo.utils.timing import quartiles

C = TypeVar("C")
_FEWEST, _MOST = 8, 256  # candidates of a method
_FOR_HALVING = 0.5  # of the time
_TRIES = 20  # draws for each candidate, since many cannot do what is asked for
_FINALISTS = 3  # candidates of a method that are followed to the end
_TURNS, _FINAL_TURNS = 3, 7  # the median of three forgives one that others disturbed
_CALIBRATED = (0.75, 0.5, 0.3)  # GFLOPs of dense at which a method is timed
_BISECTIONS = 14
_NEAR = 0.002  # of the dense model's GFLOPs: near enough below what is asked for
_CLOSE = 1.03  # times the speed asked for: faster than that gives away tokens
_DIGITS = 4  # of a keep rate


@dataclass(frozen=True)
class Speed:
    """Times as fast as the dense model of the same turn; half of the turns lie between `low` and `high`."""

    median: float
    low: float
    high: float
    turns: int


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
    def method(self) -> str:
        return self.point.config.method

    @property
    def distance(self) -> float:
        return self.quality.distance

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "config": self.point.config.to_dict(),
            "counts": self.point.cost.counts,
            "gflops": self.point.cost.gflops,
            "speed": asdict(self.speed),
            "search": asdict(self.quality),
        }


_distance, _speed = attrgetter("distance"), attrgetter("speed.median")  # of a `Measured`


def _gain(point: Point, speed: Speed) -> float:
    """Return the time saved for each part of the GFLOPs that is saved."""
    return (1 - 1 / speed.median) / (1 - point.cost.gflops)


def solve(subject: Subject, space: Space, candidate: Candidate, gflops: float) -> Point:
    """Return a candidate with as many tokens as fit into GFLOPs relative to dense, by bisection.

    Raises:
        ValueError: The candidate cannot do with so few, or cannot run at all.
    """
    values = space.values(candidate)
    shape = {name: values.pop(name) for name in SCHEDULE_AXES if name in values}
    found: Point | None = None
    reason = f"{gflops:.2f} of the dense model's GFLOPs are too few"
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        amount = (low + high) / 2
        budget: dict[str, Any] = {"keep_rate": round(amount, _DIGITS)}
        try:
            if shape:
                counts = counts_at(**shape, amount=amount, n_tokens=subject.tokens)
                budget = {"schedule": schedule_of(counts, subject.tokens, any_size=subject.any_size)}
            config = ReductionConfig.of(**values, **budget)
            cost = subject.cost(config)
        except NothingToReduceError:
            high = amount
            continue
        except (ValueError, UnsupportedModelError) as error:  # out of the method's reach: more must stay
            low, reason = amount, str(error)
            continue
        if cost.gflops > gflops:
            high = amount
        else:
            low, found = amount, Point(candidate, config, cost)
            if gflops - cost.gflops < _NEAR:
                break
        if high - low < 0.5 / subject.tokens:
            break
    if found is None:
        raise ValueError(reason)
    return found


def rungs_of(images: int) -> list[int]:
    """Return how many images, or batches, each round of successive halving compares: doubled, up to all.

    >>> rungs_of(7)
    [1, 2, 4, 7]
    """
    rungs = [images]
    while rungs[0] > 1:
        rungs.insert(0, -(-rungs[0] // 2))
    return rungs


def halving(
    candidates: Sequence[C], rungs: Sequence[int], evaluate: Callable[[Sequence[C], int], Mapping[C, float]]
) -> list[C]:
    """Compare candidates by successive halving: half of them stay from round to round, and at least two.

    Args:
        candidates: Those of the first round.
        rungs: Images of each round.
        evaluate: Returns the values of candidates on so many images; one that has no value is out.

    Returns:
        The candidates of the last round, least value first.
    """
    best = list(candidates)
    for images in rungs:
        values = evaluate(best, images)
        ranked = sorted((candidate for candidate in best if candidate in values), key=lambda c: values[c])
        best = ranked if images == rungs[-1] else ranked[: max(2, math.ceil(len(best) / 2))]
    return best


class Search:
    """The steps of a search, each of which a journal keeps, so that a stopped search continues where it was.

    Attributes:
        notes: What the report should say about how the search went.
    """

    def __init__(
        self,
        subject: Subject,
        spaces: Mapping[str, Space],
        target: Target,
        journal: Journal,
        *,
        minutes: float,
        settings: TuneSettings,
    ) -> None:
        self.subject, self.spaces, self.target, self.journal = subject, spaces, target, journal
        self.notes: list[str] = []
        self._budget, self._settings = 60 * minutes, settings
        self._rungs = rungs_of(len(subject.images.search))
        self._gains: dict[str, float] = {}
        self._reasons: dict[str, str] = {}  # why the first candidate of a method could not do what was asked for
        self._began, self._before = time.monotonic(), journal.header.get("seconds", 0.0)
        self._progress = partial(progress, every_seconds=10, quiet=settings.quiet)

    @property
    def seconds(self) -> float:
        """Seconds that the search took so far, earlier runs included."""
        return float(self._before) + time.monotonic() - self._began

    def run(self) -> dict[str, Any]:
        """Run the whole search; return what it adds to the journal's header."""
        if self.target.by_time:
            self._calibrate()
        best = {method: self._best_of(space) for method, space in self.spaces.items()}
        for method in [method for method, found in best.items() if not found]:
            self.notes.append(f"{method} cannot do it ({self._reasons.get(method, 'no reason')})")
            del best[method]
        if not best:
            raise ValueError(f"no method can do it: {self.target}; {'; '.join(self.notes)}")
        front = self._front(best)
        chosen = self._choose(best)
        answer = self._winner(chosen).method
        speeds = self._speeds([each.point for each in chosen], _FINAL_TURNS, "final")
        final = [replace(each, speed=speed) for each, speed in zip(chosen, speeds, strict=True)]
        subject = self.subject
        n_batches = len(subject.images.confirmation)
        rows = {}
        for each in final:
            confirmed = self._quality_of("confirmation", each.point, 0, n_batches)
            rows[each.method] = {**each.as_dict(), "confirmation": asdict(confirmed)}
        return {
            "config": rows[answer]["config"],
            "chosen": rows[answer],
            "beside": [row for method, row in rows.items() if method != answer],
            # What was timed several times is shown as it was timed last, in the most turns.
            "front": [each.as_dict() for each in {each.point.config: each for each in (*front, *final)}.values()],
            "dense": {"accuracy": subject.accuracy(subject.images.confirmation), "tokens": subject.tokens},
            "left_out": [reason for space in self.spaces.values() for reason in space.left_out],
            "notes": self.notes,
        }

    def _once(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, as JSON has it; it is called once per kind and key, in all runs together."""

        def timed() -> dict[str, Any]:
            found = {"found": compute()}
            self.journal.header["seconds"] = round(self.seconds, 2)
            return found

        return self.journal.once({"kind": kind, "key": key}, timed)["found"]

    def _quality(self, point: Point, batches: int) -> Quality:
        """Return the quality on the first so many batches to search on, where a round ends."""
        ends = [0, *(rung for rung in self._rungs if rung <= batches)]
        first, *further = (self._quality_of("search", point, start, end) for start, end in pairwise(ends))
        return sum(further, start=first)

    def _full_quality(self, point: Point) -> Quality:
        return self._quality(point, self._rungs[-1])

    def _quality_of(self, part: str, point: Point, start: int, end: int) -> Quality:
        """Return the quality on some batches of a part of the images: "search" or "confirmation"."""
        batches = getattr(self.subject.images, part)[start:end]
        key = {"config": point.config.to_dict(), "part": part, "batches": [start, end]}
        return Quality(**self._once("quality", key, lambda: asdict(self.subject.quality(point.config, batches))))

    def _speeds(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Speed]:
        """Time all points and the dense model in turns."""
        configs = [point.config for point in points]
        key = {"purpose": purpose, "config": [config.to_dict() for config in configs], "repeats": repeats}
        times = self._once("times", key, lambda: self.subject.times(configs, repeats)) if points else []
        found = []
        for relative in times:
            low, middle, high = quartiles([1 / time for time in relative])
            found.append(Speed(middle, low, high, len(relative)))
        return found

    def _measured(self, points: Sequence[Point], purpose: str) -> list[Measured]:
        """Return points with their quality on all images to search on, and their speeds."""
        speeds = self._speeds(points, _TURNS, purpose)
        return [Measured(p, self._full_quality(p), speed) for p, speed in zip(points, speeds, strict=True)]

    def _solved(self, method: str, candidate: Candidate, gflops: float) -> Point | None:
        """Return a candidate that costs so much; None if it cannot."""
        try:
            return solve(self.subject, self.spaces[method], candidate, gflops)
        except ValueError as error:
            self._reasons.setdefault(method, str(error))
            return None

    def _calibrate(self) -> None:
        """Time every method at a few GFLOPs, to see how much time they save."""
        points = []
        for method, space in self.spaces.items():
            points += [p for gflops in _CALIBRATED if (p := self._solved(method, space.first(), gflops)) is not None]
        timed = list(zip(points, self._speeds(points, _TURNS, "calibration"), strict=True))
        for method in self.spaces:
            self._gains[method] = median([_gain(p, s) for p, s in timed if p.config.method == method] or [0.0])

    def _gflops(self, method: str, level: float) -> float:
        """Return the GFLOPs at which a method reaches a level, one of time where the target is; both as of dense."""
        if not self.target.by_time:
            return level
        return 1 - (1 - level) / max(self._gains[method], 1e-9)

    def _best_of(self, space: Space) -> list[Candidate]:
        """Run successive halving at the target's level; return the candidates of the last round, best first."""
        chance = random.Random(derived_seed(self._settings.seed, "candidates", space.method))
        gflops = self._gflops(space.method, self.target.level)
        count = min(self._count(), space.size)
        points: dict[Candidate, Point] = {}
        first = space.first()
        drawn = [first, *space.around(first), *(space.sample(chance) for _ in range(_TRIES * count))]
        for candidate in dict.fromkeys(drawn):
            if len(points) < count and (point := self._solved(space.method, candidate, gflops)) is not None:
                points[candidate] = point
        total = sum(math.ceil(len(points) / 2**number) for number in range(len(self._rungs)))
        with self._progress(total, f"searching {space.method}") as advance:

            def evaluate(candidates: Sequence[Candidate], batches: int) -> dict[Candidate, float]:
                values: dict[Candidate, float] = {}
                for candidate in candidates:
                    try:
                        values[candidate] = self._quality(points[candidate], batches).distance
                    except ValueError as error:
                        self._reasons.setdefault(space.method, str(error))
                        continue
                    advance(f"{self.subject.objective} {min(values.values()):.4g}")
                return values

            return halving(list(points), self._rungs, evaluate)

    def _count(self) -> int:
        """Return the candidates of each method: what was asked for, or what the time allows."""
        if self._settings.candidates is not None:
            return self._settings.candidates

        def compute() -> int:
            images = self.subject.images
            per_image = self.subject.seconds_of_dense() / images.timing.images
            # A reduced model takes about two thirds of the dense one's time. The first round costs a batch for each
            # candidate; every further one two thirds of that, since half of them stay, and what stays saw half.
            each = 0.67 * per_image * images.search[0].images * (1 + 0.67 * (len(self._rungs) - 1))
            return round(min(_MOST, max(_FEWEST, _FOR_HALVING * self._budget / len(self.spaces) / each)))

        return int(self._once("plan", "candidates", compute))

    def _front(self, best: Mapping[str, Sequence[Candidate]]) -> list[Measured]:
        """Return the best candidates of each method at the levels of the front, all timed in turns."""
        points: dict[ReductionConfig, Point] = {}
        for method, candidates in best.items():
            for level in self.target.levels:
                if (point := self._solved(method, candidates[0], self._gflops(method, level))) is not None:
                    points[point.config] = point
        return self._measured(list(points.values()), "front")

    def _choose(self, best: Mapping[str, Sequence[Candidate]]) -> list[Measured]:
        """Return the point of each method that meets the target; methods without one are left out."""
        if self.target.kind == "speedup":
            found = (self._at_speed(method, candidates) for method, candidates in best.items())
            return [each for each in found if each is not None]
        if self.target.kind == "gflops":
            points = [self._solved(method, candidates[0], self.target.level) for method, candidates in best.items()]
        else:
            points = [self._within_drop(method, candidates[0]) for method, candidates in best.items()]
        return self._measured([point for point in points if point is not None], "chosen")

    def _winner(self, chosen: Sequence[Measured]) -> Measured:
        """Return the best of the methods' points.

        That is the fastest where an accuracy was asked for. Otherwise it is the nearest to dense among those that are
        fast enough, or the fastest if none is.
        """
        if not chosen:
            raise ValueError(f"no method can do it: {self.target}")
        fast = [each for each in chosen if self.target.kind == "gflops" or each.speed.median >= self.target.value]
        if self.target.kind == "max_drop" or not fast:
            return max(chosen, key=_speed)
        return min(fast, key=_distance)

    def _at_speed(self, method: str, candidates: Sequence[Candidate]) -> Measured | None:
        """Move each finalist until it is measured to be as fast as was asked for, and little faster."""
        wanted = self.target.value
        budgets = dict.fromkeys(candidates[:_FINALISTS], self._gflops(method, self.target.level))
        fast: list[Measured] = []
        slow: list[Measured] = []
        for number in range(3):
            points = [p for p in (self._solved(method, c, gflops) for c, gflops in budgets.items()) if p is not None]
            measured = self._measured(points, f"finalists {number}")
            for each in measured:
                (fast if each.speed.median >= wanted else slow).append(each)
            off = [each for each in measured if not wanted <= each.speed.median <= wanted * _CLOSE]
            saved = 1 - 1 / (wanted * (1 + _CLOSE) / 2)
            budgets = {each.point.candidate: 1 - saved / max(_gain(each.point, each.speed), 1e-9) for each in off}
        return min(fast, key=_distance) if fast else max(slow, key=_speed, default=None)

    def _within_drop(self, method: str, candidate: Candidate) -> Point | None:
        """Return the cheapest point of a candidate that loses no more than allowed, by bisection on its GFLOPs."""
        found: Point | None = None
        low, high = 0.0, 1.0
        for _ in range(8):
            gflops = (low + high) / 2
            point = self._solved(method, candidate, gflops)
            if point is not None and self._full_quality(point).loss.points <= self.target.value:
                found, high = point, gflops
            else:
                low = gflops
        return found
