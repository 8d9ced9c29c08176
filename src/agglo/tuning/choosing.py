"""The choice: of what the search found, the point of each method that meets the target best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from agglo.config import ReductionConfig
from agglo.tuning.search import Search
from agglo.tuning.solver import Measured, Point
from agglo.tuning.space import Candidate
from agglo.tuning.statistics import Quality

_FINALISTS = 3  # candidates of a method that are brought to the very speed
_ADJUSTMENTS = 3
_CLOSE = 1.03  # times the speed asked for: faster than that gives away tokens
_TURNS = 4

_distance, _speed = attrgetter("distance"), attrgetter("speed.median")  # of a `Measured`


def choose(search: Search, best: Mapping[str, Sequence[Candidate]], front: Sequence[Measured]) -> dict[str, Measured]:
    """Return the point of each method that meets the target; methods without one are left out."""
    if search.target.kind == "max_drop":
        return _by_drop(search, best, front)
    chosen: dict[str, Measured] = {}
    for method, candidates in best.items():
        if search.target.kind == "gflops":
            point = search.solver.solve(candidates[0], search.target.level)
            chosen[method] = search.measured([point], _TURNS, "chosen")[0]
        elif found := _at_speed(search, candidates, [each for each in front if each.point.config.method == method]):
            chosen[method] = found
    return chosen


def winner(search: Search, chosen: Mapping[str, Measured]) -> Measured:
    """Return the best of the methods' points.

    That is the fastest where an accuracy was asked for. Otherwise it is the nearest to dense among those that are fast
    enough, or the fastest if none is.
    """
    if not chosen:
        raise ValueError(f"no method can do it: {search.target}")
    found = list(chosen.values())
    if search.target.kind == "speedup":
        found = [each for each in found if each.speed.median >= search.target.value]
    if search.target.kind == "max_drop" or not found:
        return max(chosen.values(), key=_speed)
    return min(found, key=_distance)


def _at_speed(search: Search, candidates: Sequence[Candidate], front: Sequence[Measured]) -> Measured | None:
    """Move the amount of each finalist until it is measured to be as fast as was asked for, and little faster.

    Points of the front that are fast enough and nearer to dense than all finalists are timed once more, beside the best
    of these.
    """
    wanted = search.target.value
    levels = dict.fromkeys(candidates[:_FINALISTS], search.target.level)
    fast: list[Measured] = []
    slow: list[Measured] = []
    for number in range(_ADJUSTMENTS):
        points = [p for p in (search.solved(c, level) for c, level in levels.items()) if p is not None]
        if not points:
            break
        measured = search.measured(points, _TURNS, f"finalists {number}")
        for each in measured:
            (fast if each.speed.median >= wanted else slow).append(each)
        # What is predicted is off by some factor: ask for that much less, or more, in the next round.
        off = [each for each in measured if not wanted <= each.speed.median <= wanted * _CLOSE]
        levels = {each.point.candidate: _next_level(search, each) for each in off}
    found = min(fast, key=_distance) if fast else max(slow, key=_speed, default=None)
    most = min(map(_distance, fast), default=math.inf)
    nearer = [each.point for each in front if each.speed.median >= wanted and each.distance < most]
    if not nearer:
        return found
    timed = {point.config: point for point in (*([] if found is None else [found.point]), *nearer)}
    again = search.measured(list(timed.values()), _TURNS, "finalists and front")
    return min((each for each in again if each.speed.median >= wanted), key=_distance, default=found)


def _next_level(search: Search, each: Measured) -> float:
    """Return the level at which the solver, which has learned from this measurement, should meet the speed."""
    predicted = search.solver.predicted(each.point)
    return predicted + 1 / (search.target.value * (1 + _CLOSE) / 2) - 1 / each.speed.median


def allowed_distance(measured: Sequence[Quality], most: float) -> float:
    """Return the distance to the dense output up to which about `most` points are lost, fitted to all points together.

    A distance is known far better than a drop from the same images. Accuracy is lost in proportion to the KL, decisions
    change in proportion to its root; the factor is fitted by least squares. Infinite where nothing was lost anywhere.
    """
    power = 1.0 if all(quality.drop is not None for quality in measured) else 0.5
    distances = [quality.distance**power for quality in measured]
    drops = [quality.loss.points for quality in measured]
    squares = sum(distance**2 for distance in distances)
    factor = sum(d * x for d, x in zip(drops, distances, strict=True)) / squares if squares else 0.0
    return (most / factor) ** (1 / power) if factor > 0 else math.inf


def _by_drop(search: Search, best: Mapping[str, Sequence[Candidate]], front: Sequence[Measured]) -> dict[str, Measured]:
    if not front:
        return {}
    allowed = allowed_distance([each.quality for each in front], search.target.value)
    chosen: dict[str, Measured] = {}
    for method, candidates in best.items():
        within = [each.point for each in front if each.point.config.method == method and each.distance <= allowed]
        within += [point for c in candidates[:_FINALISTS] if (point := _nearest_to(search, c, allowed))]
        points: dict[ReductionConfig, Point] = {point.config: point for point in within}
        if points:
            chosen[method] = max(search.measured(list(points.values()), _TURNS, "finalists"), key=_speed)
    if not chosen:
        least = min(front, key=_distance)
        raise ValueError(
            f"{search.target}: {least.quality.loss} are lost even at {least.speed.median:.2f} times the dense speed"
        )
    return chosen


def _nearest_to(search: Search, candidate: Candidate, allowed: float) -> Point | None:
    """Return the cheapest point of a candidate within the allowed distance, by bisection on its cost."""
    found: Point | None = None
    low, high = min(search.target.levels), 0.97
    for _ in range(2 * _ADJUSTMENTS):
        level = (low + high) / 2
        point = search.solved(candidate, level)
        if point is not None and search.full_quality(point).distance <= allowed:
            found, high = point, level
        else:
            low = level
    return found
