"""The search: calibrate, halve the candidates of each method at one cost, follow the best of them along the front."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agglo.experiments.progress import progress
from agglo.experiments.randomness import derived_seed
from agglo.tuning.halving import halving, rungs_of
from agglo.tuning.latency import Latency, counts_to_time, steps_of
from agglo.tuning.points import Measured, Point, Solver, Speed
from agglo.tuning.record import Record
from agglo.tuning.space import Candidate, Space
from agglo.tuning.statistics import Quality, quality_from
from agglo.tuning.subject import Subject
from agglo.tuning.target import Target
from agglo.tuning.time_model import Timed

_FEWEST, _MOST = 8, 256  # candidates of a method
_FOR_HALVING = 0.5  # of the time
_FOR_TABLE = 0.15
_OF_DENSE = 0.85  # of its seconds, by count: what a slice takes on average, and the dense passes in between
_TRIES = 20  # draws for each candidate, since many cannot be what is asked for
_FOLLOWED = 2  # candidates of a method that are followed along the front
_TURNS = 3  # the median of three forgives one that others disturbed
_CALIBRATED = (0.75, 0.5, 0.3)  # GFLOPs of dense at which a method is timed


class Search:
    """notes: what a person should know about how it went."""

    def __init__(
        self,
        subject: Subject,
        spaces: dict[str, Space],
        target: Target,
        record: Record,
        *,
        minutes: float,
        candidates: int | None,
        seed: int,
        quiet: bool,
    ) -> None:
        self.subject, self.spaces, self.target, self.record = subject, spaces, target, record
        self.solver = Solver(subject, spaces, by_time=target.by_time)
        self.notes: list[str] = []
        self._budget, self._asked, self._seed, self._quiet = 60 * minutes, candidates, seed, quiet
        self._partial: dict[str, dict[int, Quality]] = {}

    # What is measured, once in all runs together.

    def quality(self, point: Point, batches: int) -> Quality:
        """On the first so many batches of the images to search on; what fewer of them gave is not computed again."""
        known = self._partial.setdefault(str(point.arguments), {})

        def compute() -> dict[str, Any]:
            fewer = max((count for count in known if count < batches), default=0)
            found = self.subject.quality(point.arguments, self.subject.images.search[fewer:batches])
            return (known[fewer] + found if fewer else found).as_dict()

        key = {"apply": point.arguments, "batches": batches}
        known[batches] = quality_from(self.record.once("quality", key, compute))
        return known[batches]

    def full_quality(self, point: Point) -> Quality:
        return self.quality(point, len(self.subject.images.search))

    def confirmed(self, point: Point) -> Quality:
        """On the images that the search never saw."""

        def compute() -> dict[str, Any]:
            return self.subject.quality(point.arguments, self.subject.images.confirmation).as_dict()

        return quality_from(self.record.once("confirmation", {"apply": point.arguments}, compute))

    def speeds(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Speed]:
        """All points and the dense model in turns."""
        if not points:
            return []
        ways = [point.arguments for point in points]
        key = {"purpose": purpose, "apply": ways, "repeats": repeats}
        times = self.record.once("times", key, lambda: self.subject.times(ways, repeats))
        return [Speed.of(of_one) for of_one in times]

    # The steps of the search.

    def calibrate(self) -> None:
        """Time slices of tokens and every option of every method: where the device is fast, and what a method takes."""
        if not self.target.by_time:
            return
        if self.subject.depth is not None and not self.subject.any_size:
            self._time_table()
        points: list[Point] = []
        for space in self.spaces.values():
            first = space.first()
            wanted = [(first, level) for level in _CALIBRATED]
            options = [n for n, axis in enumerate(space.axes) if axis.name not in ("start", "last", "curve", "stride")]
            wanted += [(c, 0.5) for c in space.around(first) if any(c.picks[n] != first.picks[n] for n in options)]
            for candidate, level in wanted:
                try:
                    points.append(self.solver.solve_by(candidate, level, lambda cost: cost.gflops))
                except ValueError as error:
                    self._cannot(candidate, level, error)
        with self._progress(1, "timing the methods") as advance:
            self.solver.learn_from(points, self.speeds(points, _TURNS, "calibration"))
            advance(f"{len(points)} ways")

    def _time_table(self) -> None:
        tokens, prefix = self.subject.tokens, self.subject.prefix
        seconds = self.record.once("seconds", "dense", self.subject.seconds_of_dense)
        fitting = {
            step: counts
            for step in steps_of(tokens, prefix)
            if _OF_DENSE * (_TURNS + 1) * seconds * len(counts := counts_to_time(tokens, prefix, step))
            <= _FOR_TABLE * self._budget
        }
        if not fitting:
            self.notes.append("counts stay where they fell: there was no time to measure where the device is fast")
            return
        step, counts = next(iter(fitting.items()))
        with self._progress(1, "timing token counts") as advance:
            taken = self.record.once("latency", counts, lambda: list(self.subject.sliced(counts, _TURNS).values()))
            advance(f"{len(counts)} counts")
        latency = Latency.of(dict(zip(counts, taken, strict=True)), step)
        self.solver.latency = latency
        timed = []
        for count, seconds in zip(latency.counts, latency.seconds, strict=True):
            if count < self.subject.tokens:
                cost = self.subject.cost(self.subject.slicing(count))
                timed.append(Timed(cost.gflops, 0.0, (), seconds))
        self.solver.learn(timed)

    def best_of(self, space: Space) -> list[Candidate]:
        """Successive halving at the target's level: the candidates of the last round, best first."""
        chance = random.Random(derived_seed(self._seed, "candidates", space.method))
        level = self.target.level
        solved: dict[Candidate, Point] = {}
        refused: set[Candidate] = set()

        def solvable(candidate: Candidate) -> bool:
            if candidate in solved or candidate in refused:
                return False
            try:
                solved[candidate] = self.solver.solve(candidate, level)
            except ValueError as error:
                refused.add(candidate)
                self._cannot(candidate, level, error)
                return False
            return True

        count = min(self._count(), space.size)
        for candidate in (space.first(), *space.around(space.first())):
            if len(solved) < count:
                solvable(candidate)
        for _ in range(_TRIES * count):
            if len(solved) == count:
                break
            solvable(space.sample(chance))
        if not solved:
            return []

        def breed(best: Sequence[Candidate], wanted: int) -> list[Candidate]:
            born: list[Candidate] = []
            for number in range(_TRIES * wanted):
                if len(born) == wanted:
                    break
                # Parents in order: the better ones more often.
                mutant = space.mutant(best[chance.randrange(1 + number % len(best))], chance)
                if solvable(mutant):
                    born.append(mutant)
            return born

        rungs = rungs_of(len(self.subject.images.search), 1)
        total = self._evaluations(len(solved), len(rungs))
        deadline = self.record.seconds + _FOR_HALVING * self._budget / len(self.spaces)
        with self._progress(total, f"searching {space.method}") as advance:

            def evaluate(candidates: Sequence[Candidate], batches: int) -> dict[Candidate, float]:
                values: dict[Candidate, float] = {}
                for number, candidate in enumerate(candidates):
                    point = solved[candidate]
                    known = self.record.knows("quality", {"apply": point.arguments, "batches": batches})
                    if not known and self.record.seconds > deadline and number >= max(2, len(candidates) // 4):
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

            return halving(list(solved), rungs, evaluate, breed)

    def front(self, best: dict[str, list[Candidate]]) -> list[Measured]:
        """The best candidates of each method at the levels of the front, all timed in turns."""
        points: list[Point] = []
        levels = self.target.levels
        with self._progress(len(levels) * len(best), "following the front") as advance:
            for method, candidates in best.items():
                for level in levels:
                    solved = [p for p in (self.solved(c, level) for c in candidates[:_FOLLOWED]) if p is not None]
                    if solved:
                        points.append(min(solved, key=lambda point: self.full_quality(point).distance))
                    advance(method)
        points = list({str(point.arguments): point for point in points}.values())
        return self.measured(points, _TURNS, "front")

    def measured(self, points: Sequence[Point], repeats: int, purpose: str) -> list[Measured]:
        """Points with their quality on all images to search on, and their speeds."""
        speeds = self.speeds(points, repeats, purpose)
        self.solver.learn_from(points, speeds)
        return [Measured(p, self.full_quality(p), speed) for p, speed in zip(points, speeds, strict=True)]

    def solved(self, candidate: Candidate, level: float) -> Point | None:
        try:
            return self.solver.solve(candidate, level)
        except ValueError as error:
            self._cannot(candidate, level, error)
            return None

    def why_not(self, method: str) -> str:
        """Why the first candidate of a method that could not be what was asked for could not."""
        cannot = (step for step in self.record.content["steps"] if step["kind"] == "cannot")
        return next((step["found"] for step in cannot if step["key"]["candidate"]["method"] == method), "no reason")

    def _cannot(self, candidate: Candidate, level: float, error: Exception) -> None:
        key = {"candidate": self.spaces[candidate.method].values(candidate), "level": level}
        self.record.note("cannot", key, str(error))

    def _count(self) -> int:
        """Candidates of each method: what was asked for, or what the time allows."""
        if self._asked is not None:
            return self._asked

        def compute() -> int:
            images = self.subject.images
            per_image = self.record.once("seconds", "dense", self.subject.seconds_of_dense) / images.timing.images
            # A reduced model takes about two thirds of the dense one's time. The first round costs a batch for each
            # candidate; every further one two thirds of that, since half of them stay, and what stays saw half.
            further = len(rungs_of(len(images.search), 1)) - 1
            each = 0.67 * per_image * images.search[0].images * (1 + 0.67 * further)
            return round(min(_MOST, max(_FEWEST, _FOR_HALVING * self._budget / len(self.spaces) / each)))

        return int(self.record.once("plan", "candidates", compute))

    @staticmethod
    def _evaluations(count: int, rounds: int) -> int:
        total = count
        for _ in range(rounds - 1):
            count = min(count, max(2, -(-count // 2)))
            total += count
        return total

    @contextmanager
    def _progress(self, total: int, description: str) -> Iterator[Callable[[str], None]]:
        with progress(total, description, every_seconds=10, quiet=self._quiet) as advance:
            yield advance
