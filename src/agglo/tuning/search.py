"""The search: calibrate, halve the candidates of each method at one cost, follow the best of them along the front."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from agglo.config import ReductionConfig
from agglo.tuning.settings import Target, TuneSettings
from agglo.tuning.solver import Latency, Measured, Point, Solver, Speed, Timed, counts_to_time, steps_of
from agglo.tuning.space import Candidate, Space
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Subject
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.randomness import derived_seed

C = TypeVar("C")
_FEWEST, _MOST = 8, 256  # candidates of a method
_FOR_HALVING = 0.5  # of the time
_FOR_TABLE = 0.15
_OF_DENSE = 0.85  # of its seconds, by count: what a slice takes on average, and the dense passes in between
_TRIES = 20  # draws for each candidate, since many cannot do what is asked for
_FOLLOWED = 2  # candidates of a method that are followed along the front
_TURNS = 3  # the median of three forgives one that others disturbed
_CALIBRATED = (0.75, 0.5, 0.3)  # GFLOPs of dense at which a method is timed


def rungs_of(images: int, least: int) -> list[int]:
    """Return the images of each round of successive halving: doubled up to all, beginning with at least `least`.

    >>> rungs_of(200, 32), rungs_of(20, 32)
    ([50, 100, 200], [20])
    """
    rungs = [images]
    while rungs[0] // 2 >= least:
        rungs.insert(0, -(-rungs[0] // 2))
    return rungs


def halving(
    candidates: Sequence[C],
    rungs: Sequence[int],
    evaluate: Callable[[Sequence[C], int], Mapping[C, float]],
    breed: Callable[[Sequence[C], int], Sequence[C]] = lambda best, count: (),
) -> list[C]:
    """Compare candidates by successive halving: half of them stay from round to round, and at least two.

    Args:
        candidates: Those of the first round.
        rungs: Images of each round.
        evaluate: Returns the values of candidates on so many images; one that has no value is out.
        breed: Returns up to so many new candidates, given those that stay, best first. They replace the last of these.

    Returns:
        The candidates of the last round, least value first.
    """
    best = list(dict.fromkeys(candidates))
    for number, images in enumerate(rungs):
        if number:
            count = max(2, math.ceil(len(best) / 2))
            new = [candidate for candidate in breed(best[:count], count // 3) if candidate not in best]
            best = [*best[: count - len(new)], *new]
        values = evaluate(best, images)
        best = sorted((candidate for candidate in best if candidate in values), key=lambda c: values[c])
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
        self.solver = Solver(subject, spaces, by_time=target.by_time)
        self.notes: list[str] = []
        self._budget, self._settings = 60 * minutes, settings
        self._partial: dict[ReductionConfig, dict[int, Quality]] = {}
        self._began, self._before = time.monotonic(), journal.header.get("seconds", 0.0)
        self._progress = partial(progress, every_seconds=10, quiet=settings.quiet)

    @property
    def seconds(self) -> float:
        """Seconds that the search took so far, earlier runs included."""
        return float(self._before) + time.monotonic() - self._began

    def once(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, as JSON has it; it is called once per kind and key, in all runs together."""

        def timed() -> dict[str, Any]:
            found = {"found": compute()}
            self.journal.header["seconds"] = round(self.seconds, 2)
            return found

        return self.journal.once({"kind": kind, "key": key}, timed)["found"]

    def quality(self, point: Point, batches: int) -> Quality:
        """Return the quality on the first so many batches to search on; what fewer gave is not computed again."""
        known = self._partial.setdefault(point.config, {})

        def compute() -> dict[str, Any]:
            fewer = max((count for count in known if count < batches), default=0)
            found = self.subject.quality(point.config, self.subject.images.search[fewer:batches])
            return asdict(known[fewer] + found if fewer else found)

        known[batches] = Quality(**self.once("quality", _quality_key(point, batches), compute))
        return known[batches]

    def full_quality(self, point: Point) -> Quality:
        """Return the quality on all images to search on."""
        return self.quality(point, len(self.subject.images.search))

    def confirmed(self, point: Point) -> Quality:
        """Return the quality on the images that the search never saw."""

        def compute() -> dict[str, Any]:
            return asdict(self.subject.quality(point.config, self.subject.images.confirmation))

        return Quality(**self.once("confirmation", {"config": point.config.to_dict()}, compute))

    def speeds(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Speed]:
        """Time all points and the dense model in turns."""
        if not points:
            return []
        configs = [point.config for point in points]
        key = {"purpose": purpose, "config": [config.to_dict() for config in configs], "repeats": repeats}
        times = self.once("times", key, lambda: self.subject.times(configs, repeats))
        return [Speed.of(of_one) for of_one in times]

    def measured(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Measured]:
        """Return points with their quality on all images to search on, and their speeds."""
        speeds = self.speeds(points, repeats, purpose)
        self.solver.learn_from(points, speeds)
        return [Measured(p, self.full_quality(p), speed) for p, speed in zip(points, speeds, strict=True)]

    def solved(self, candidate: Candidate, level: float) -> Point | None:
        """Return a candidate that costs what the level allows; None, with the reason in the journal, if it cannot."""
        try:
            return self.solver.solve(candidate, level)
        except ValueError as error:
            self._cannot(candidate, level, error)
            return None

    def why_not(self, method: str) -> str:
        """Return the reason of a method's first candidate that could not do what was asked for."""
        cannot = (step for step in self.journal.results if step["kind"] == "cannot")
        return next((step["found"] for step in cannot if step["key"]["candidate"]["method"] == method), "no reason")

    def _cannot(self, candidate: Candidate, level: float, error: Exception) -> None:
        key = {"candidate": self.spaces[candidate.method].values(candidate), "level": level}
        if (cell := {"kind": "cannot", "key": key}) not in self.journal:
            self.journal.add(cell, {"found": str(error)}, write=False)

    def calibrate(self) -> None:
        """Time token counts, to see where the device is fast, and every option of every method, to see its cost."""
        if not self.target.by_time:
            return
        if self.subject.depth is not None and not self.subject.any_size:
            self._time_counts()
        points: list[Point] = []
        for space in self.spaces.values():
            first = space.first()
            wanted = [(first, level) for level in _CALIBRATED]
            wanted += [(other, 0.5) for other in space.around(first) if space.traits(other) != space.traits(first)]
            for candidate, level in wanted:
                try:
                    points.append(self.solver.solve(candidate, level, by_gflops=True))
                except ValueError as error:
                    self._cannot(candidate, level, error)
        with self._progress(1, "timing the methods") as advance:
            self.solver.learn_from(points, self.speeds(points, _TURNS, "calibration"))
            advance(f"{len(points)} configs")

    def _time_counts(self) -> None:
        tokens, prefix = self.subject.tokens, self.subject.prefix
        per_count = _OF_DENSE * (_TURNS + 1) * self._seconds_of_dense()
        tables = ((step, counts_to_time(tokens, prefix, step)) for step in steps_of(tokens, prefix))
        fitting = [(step, counts) for step, counts in tables if per_count * len(counts) <= _FOR_TABLE * self._budget]
        if not fitting:
            self.notes.append("token counts were not aligned: there was no time to measure where the device is fast")
            return
        step, counts = fitting[0]
        slices = [self.subject.slicing(count) for count in counts]
        with self._progress(1, "timing token counts") as advance:
            taken = self.once("latency", counts, lambda: self.subject.times(slices, _TURNS))
            advance(f"{len(counts)} counts")
        self.solver.latency = latency = Latency.of(dict(zip(counts, taken, strict=True)), step)
        costs = [self.subject.cost(config) for config in slices]
        timed = zip(counts, costs, latency.seconds, strict=True)
        self.solver.learn([Timed(cost.gflops, 0.0, (), seconds) for count, cost, seconds in timed if count < tokens])

    def best_of(self, space: Space) -> list[Candidate]:
        """Run successive halving at the target's level; return the candidates of the last round, best first."""
        chance = random.Random(derived_seed(self._settings.seed, "candidates", space.method))
        level = self.target.level
        tried: dict[Candidate, Point | None] = {}

        def is_new(candidate: Candidate) -> bool:
            """Solve a candidate; return whether it can do what is asked for and was not tried before."""
            if candidate in tried:
                return False
            tried[candidate] = self.solved(candidate, level)
            return tried[candidate] is not None

        count = min(self._count(), space.size)
        drawn: list[Candidate] = []
        for candidate in (space.first(), *space.around(space.first())):
            if len(drawn) < count and is_new(candidate):
                drawn.append(candidate)
        for _ in range(_TRIES * count):
            if len(drawn) < count and is_new(candidate := space.sample(chance)):
                drawn.append(candidate)
        if not drawn:
            return []

        def breed(best: Sequence[Candidate], wanted: int) -> list[Candidate]:
            born: list[Candidate] = []
            for number in range(_TRIES * wanted):
                if len(born) == wanted:
                    break
                # Parents in order: the better ones more often.
                mutant = space.mutant(best[chance.randrange(1 + number % len(best))], chance)
                if is_new(mutant):
                    born.append(mutant)
            return born

        rungs = rungs_of(len(self.subject.images.search), 1)
        total = sum(min(len(drawn), max(2, -(-len(drawn) // 2**number))) for number in range(len(rungs)))
        deadline = self.seconds + _FOR_HALVING * self._budget / len(self.spaces)
        with self._progress(total, f"searching {space.method}") as advance:

            def evaluate(candidates: Sequence[Candidate], batches: int) -> dict[Candidate, float]:
                values: dict[Candidate, float] = {}
                for number, candidate in enumerate(candidates):
                    point = tried[candidate]
                    assert point is not None
                    known = {"kind": "quality", "key": _quality_key(point, batches)} in self.journal
                    if not known and self.seconds > deadline and number >= max(2, len(candidates) // 4):
                        self.notes.append(
                            f"{space.method}: {len(candidates) - number} of {len(candidates)} candidates of a round "
                            "were not evaluated: the time was up"
                        )
                        break
                    try:
                        values[candidate] = self.quality(point, batches).distance
                    except ValueError as error:
                        self._cannot(candidate, level, error)
                        continue
                    advance(f"{self.subject.objective} {min(values.values()):.4g}")
                return values

            return halving(drawn, rungs, evaluate, breed)

    def front(self, best: Mapping[str, Sequence[Candidate]]) -> list[Measured]:
        """Return the best candidates of each method at the levels of the front, all timed in turns."""
        points: dict[ReductionConfig, Point] = {}
        levels = self.target.levels
        with self._progress(len(levels) * len(best), "following the front") as advance:
            for method, candidates in best.items():
                for level in levels:
                    solved = [p for p in (self.solved(c, level) for c in candidates[:_FOLLOWED]) if p is not None]
                    if solved:
                        point = min(solved, key=lambda point: self.full_quality(point).distance)
                        points[point.config] = point
                    advance(method)
        return self.measured(list(points.values()), _TURNS, "front")

    def _count(self) -> int:
        """Return the candidates of each method: what was asked for, or what the time allows."""
        if self._settings.candidates is not None:
            return self._settings.candidates

        def compute() -> int:
            images = self.subject.images
            per_image = self._seconds_of_dense() / images.timing.images
            # A reduced model takes about two thirds of the dense one's time. The first round costs a batch for each
            # candidate; every further one two thirds of that, since half of them stay, and what stays saw half.
            further = len(rungs_of(len(images.search), 1)) - 1
            each = 0.67 * per_image * images.search[0].images * (1 + 0.67 * further)
            return round(min(_MOST, max(_FEWEST, _FOR_HALVING * self._budget / len(self.spaces) / each)))

        return int(self.once("plan", "candidates", compute))

    def _seconds_of_dense(self) -> float:
        return float(self.once("seconds", "dense", self.subject.seconds_of_dense))


def _quality_key(point: Point, batches: int) -> dict[str, Any]:
    return {"config": point.config.to_dict(), "batches": batches}
