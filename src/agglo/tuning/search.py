"""The search: propose candidates of each method, compare them at equal GFLOPs, choose how far the best one goes.

Candidates are compared by successive halving at about the GFLOPs that the target takes. How far the best one goes is
then found by bisection on its GFLOPs: as many tokens as the speed allows, or as few as the accuracy does. Every method
is searched in this way, and the best of the methods' answers is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial, reduce
from itertools import pairwise
from operator import add
from typing import Any

from agglo.budget import solve
from agglo.config import ReductionConfig
from agglo.tuning.result import Quality
from agglo.tuning.settings import Target, TuneSettings
from agglo.tuning.space import Candidate, Space
from agglo.tuning.subject import Subject
from agglo.utils.journal import Journal
from agglo.utils.progress import progress
from agglo.utils.randomness import derived_seed
from agglo.utils.timing import quartiles

_FEWEST, _MOST = 8, 256  # candidates of a method
_FOR_HALVING = 0.5  # of the time
_DRAWS = 20  # for each candidate, since many cannot do what is asked for
_FRONT = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3)  # GFLOPs of dense at which the best candidate of each method is shown
_ELSEWHERE = 0.5  # GFLOPs of dense at which candidates are compared where the first one cannot meet the target
_TURNS, _FINAL_TURNS = 3, 7  # the median of three forgives one that others disturbed
_OF_TARGET = 7  # bisections


class Search:
    """The steps of a search, each of which a journal keeps, so that a stopped search continues where it was."""

    def __init__(
        self,
        subject: Subject,
        spaces: Sequence[Space],
        target: Target,
        journal: Journal,
        settings: TuneSettings,
        minutes: float,
    ) -> None:
        self.subject, self.spaces, self.target, self.journal = subject, spaces, target, journal
        self._settings, self._minutes = settings, minutes
        count = len(subject.images.search)
        # Batches that each round of successive halving compares: doubled, up to all, such as 1, 2, 4 and 7.
        self._rungs = [-(-count // 2**left) for left in range((count - 1).bit_length(), -1, -1)]
        self._reasons: dict[str, str] = {}  # why the first candidate of a method could not do what was asked for
        self._began, self._before = time.monotonic(), journal.header.get("seconds", 0.0)

    def run(self) -> dict[str, Any]:
        """Run the whole search; return what it adds to the journal's header."""
        subject, answers, front = self.subject, [], []
        for space in self.spaces:
            best = self._best_of(space)
            config = None if best is None else self._reach(space, best)
            if best is not None and config is not None:
                answers.append(config)
                front += [each for gflops in _FRONT if (each := self._solved(space, best, gflops)) is not None]
        cannot = {space.method for space in self.spaces} - {config.method for config in answers}
        notes = [f"{method} cannot do it ({self._reasons.get(method, 'no reason')})" for method in sorted(cannot)]
        if not answers:
            raise ValueError(f"no method can do it: {self.target}; {'; '.join(notes)}")
        rows = self._rows(list(dict.fromkeys([*front, *answers])))
        if self.target.kind == "max_drop":  # the fastest is the best, otherwise what is nearest to dense
            answers.sort(key=lambda config: rows[config]["speed"]["median"], reverse=True)
        else:
            answers.sort(key=lambda config: Quality(**rows[config]["search"]).distance)
        n_batches = len(subject.images.confirmation)
        chosen, *beside = [
            {**rows[config], "confirmation": asdict(self._quality_of("confirmation", config, 0, n_batches))}
            for config in answers
        ]
        return {
            "config": chosen["config"],
            "chosen": chosen,
            "beside": beside,
            "front": list(rows.values()),
            "dense": {"accuracy": subject.accuracy(subject.images.confirmation), "tokens": subject.tokens},
            "notes": notes,
        }

    def _best_of(self, space: Space) -> Candidate | None:
        """Return the candidate nearest to the dense model at about the target's GFLOPs; None if there is none.

        It is found by successive halving: from round to round the better half stays, and is compared on more images.
        """
        settings, count, level = self._settings, self._count(), self.target.value
        if self.target.kind != "gflops":  # those at which the first candidate meets the target
            config = self._reach(space, space.first)
            level = _ELSEWHERE if config is None else self.subject.cost(config).gflops
        configs: dict[Candidate, ReductionConfig] = {}
        for candidate in space.propose(_DRAWS * count, derived_seed(settings.seed, "candidates", space.method)):
            if len(configs) < count and (config := self._solved(space, candidate, level)) is not None:
                configs[candidate] = config
        best = list(configs)
        with progress(len(self._rungs), f"searching {space.method}", quiet=settings.quiet) as advance:
            for batches in self._rungs:
                distances: dict[Candidate, float] = {}
                for candidate in best:
                    try:
                        distances[candidate] = self._quality(configs[candidate], batches).distance
                    except ValueError as error:  # its output is not finite
                        self._reasons.setdefault(space.method, str(error))
                best = sorted(distances, key=lambda candidate: distances[candidate])[: max(2, -(-len(best) // 2))]
                advance(f"{len(distances)} candidates")
        return best[0] if best else None

    def _count(self) -> int:
        """Return the candidates of each method: what was asked for, or what the time allows."""

        def that_fit() -> int:
            images = self.subject.images
            # A reduced model takes about two thirds of the dense one's time. The first round costs a batch for each
            # candidate; every further one two thirds of that, since half of them stay, and what stays saw half.
            batches = 0.67 * (1 + 0.67 * (len(self._rungs) - 1))
            seconds = self.subject.seconds_of_dense() * images.search[0].images / images.timing.images
            fitting = _FOR_HALVING * 60 * self._minutes / len(self.spaces) / (batches * seconds)
            return round(min(_MOST, max(_FEWEST, fitting)))

        return self._settings.candidates or int(self._once("plan", "candidates", that_fit))

    def _reach(self, space: Space, candidate: Candidate) -> ReductionConfig | None:
        """Return a candidate with as many tokens as a speed or GFLOPs allow, or as few as a drop does; None if none."""
        kind, value = self.target.kind, self.target.value
        if kind == "gflops":
            return self._solved(space, candidate, value)
        found: ReductionConfig | None = None
        low, high = 0.0, 1.0
        for _ in range(_OF_TARGET):
            gflops = (low + high) / 2
            config = self._solved(space, candidate, gflops)
            if config is None:
                meets = False
            elif kind == "speedup":
                meets = self._speeds([config], _TURNS)[0]["median"] >= value
            else:
                meets = self._quality(config, self._rungs[-1]).loss.points <= value
            if meets:
                found = config
            more_must_stay = config is None or meets == (kind == "speedup")
            low, high = (gflops, high) if more_must_stay else (low, gflops)
        return found

    def _solved(self, space: Space, candidate: Candidate, gflops: float) -> ReductionConfig | None:
        """Return a candidate that costs so much; None if it cannot."""
        try:
            return solve(partial(space.config, candidate), self.subject.share, gflops)
        except ValueError as error:
            self._reasons.setdefault(space.method, str(error))
            return None

    def _rows(self, configs: Sequence[ReductionConfig]) -> dict[ReductionConfig, dict[str, Any]]:
        """Return what is reported of configs, all timed in turns."""
        return {
            config: {
                "method": config.method,
                "config": config.to_dict(),
                **self.subject.cost(config)._asdict(),
                "speed": speed,
                "search": asdict(self._quality(config, self._rungs[-1])),
            }
            for config, speed in zip(configs, self._speeds(configs, _FINAL_TURNS), strict=True)
        }

    def _quality(self, config: ReductionConfig, batches: int) -> Quality:
        """Return the quality on the first so many batches to search on, where a round ends."""
        ends = [0, *(rung for rung in self._rungs if rung <= batches)]
        return reduce(add, (self._quality_of("search", config, start, end) for start, end in pairwise(ends)))

    def _quality_of(self, part: str, config: ReductionConfig, start: int, end: int) -> Quality:
        """Return the quality on some batches of a part of the images: "search" or "confirmation"."""
        batches = getattr(self.subject.images, part)[start:end]
        key = {"config": config.to_dict(), "part": part, "batches": [start, end]}
        return Quality(**self._once("quality", key, lambda: asdict(self.subject.quality(config, batches))))

    def _speeds(self, configs: Sequence[ReductionConfig], turns: int) -> list[dict[str, Any]]:
        """Return how many times as fast as dense configs are: the median over turns, and the quartiles."""
        key = {"config": [config.to_dict() for config in configs], "repeats": turns}
        found = []
        for times in self._once("times", key, lambda: self.subject.times(configs, turns)):
            low, middle, high = quartiles([1 / relative for relative in times])
            found.append({"median": middle, "low": low, "high": high, "turns": len(times)})
        return found

    def _once(self, kind: str, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, as JSON has it; it is called once per kind and key, in all runs together."""

        def timed() -> dict[str, Any]:
            found = {"found": compute()}
            self.journal.header["seconds"] = round(self._before + time.monotonic() - self._began, 2)
            return found

        return self.journal.once({"kind": kind, "key": key}, timed)["found"]
