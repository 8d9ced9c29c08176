"""The answer: of what the search found, the point of each method that meets the target best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agglo.tuning.points import Measured, Point
from agglo.tuning.search import Search
from agglo.tuning.space import Candidate
from agglo.tuning.statistics import Drop, Quality

_FINALISTS = 3  # candidates of a method that are brought to the very speed
_ADJUSTMENTS = 3
_CLOSE = 1.03  # times the speed asked for: faster than that gives away tokens
_TURNS = 4


def choose(search: Search, best: dict[str, list[Candidate]], front: list[Measured]) -> dict[str, Measured]:
    """By method, the point that answers the target; methods that cannot are left out."""
    kind = search.target.kind
    if kind == "max_drop":
        return _by_drop(search, best, front)
    chosen: dict[str, Measured] = {}
    for method, candidates in best.items():
        own = [each for each in front if each.point.method == method]
        found = _at_speed(search, candidates, own) if kind == "speedup" else _at_gflops(search, candidates)
        if found is not None:
            chosen[method] = found
    return chosen


def winner(search: Search, chosen: dict[str, Measured]) -> Measured:
    """Of the methods' points: the fastest where an accuracy was asked for, otherwise the nearest to dense among those
    that are fast enough, or the fastest if none is."""
    if not chosen:
        raise ValueError(f"no method can do it: {search.target}")
    found = list(chosen.values())
    if search.target.kind == "max_drop":
        return max(found, key=lambda each: each.speed.median)
    if search.target.kind == "speedup":
        fast = [each for each in found if each.speed.median >= search.target.value]
        if not fast:
            return max(found, key=lambda each: each.speed.median)
        found = fast
    return min(found, key=_distance)


def _at_gflops(search: Search, candidates: Sequence[Candidate]) -> Measured | None:
    points = [search.solver.solve(candidate, search.target.level) for candidate in candidates[:1]]
    return search.measured(points, _TURNS, "chosen")[0] if points else None


def _at_speed(search: Search, candidates: Sequence[Candidate], front: Sequence[Measured]) -> Measured | None:
    """Each finalist's amount is moved until it is measured to be as fast as was asked for, and little faster. Points of
    the front that are fast enough and nearer to dense than all finalists are timed once more, beside the best of these.
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
        levels = {each.point.candidate: _asked(search, each, wanted) for each in off}
    found = min(fast, key=_distance) if fast else max(slow, key=lambda each: each.speed.median, default=None)
    nearer = [
        each.point
        for each in front
        if each.speed.median >= wanted and (not fast or found is None or _distance(each) < _distance(found))
    ]
    if not nearer:
        return found
    timed = {str(point.arguments): point for point in ([] if found is None else [found.point]) + nearer}
    again = search.measured(list(timed.values()), _TURNS, "finalists and front")
    return min((each for each in again if each.speed.median >= wanted), key=_distance, default=found)


def _distance(each: Measured) -> float:
    return each.quality.distance


def _asked(search: Search, each: Measured, wanted: float) -> float:
    """The level to ask the solver for, which has learned from this measurement, so that it comes out at the speed."""
    measured, predicted = 1 / each.speed.median, search.solver.predicted(each.point)
    return predicted + (1 / (wanted * (1 + _CLOSE) / 2) - measured)


def lost(quality: Quality) -> Drop:
    """What counts as lost: accuracy where there are labels, otherwise the decisions that changed."""
    found = quality.drop or quality.disagreement
    assert found is not None
    return found


def allowed_distance(measured: Sequence[Quality], most: float) -> float:
    """The distance to the dense output up to which about `most` points are lost, by all points together.

    A distance is known far better than a drop from the same images. Accuracy is lost in proportion to the KL, decisions
    change in proportion to its root; the factor is fitted by least squares. Infinite where nothing was lost anywhere.
    """
    power = 1.0 if all(quality.drop is not None for quality in measured) else 0.5
    distances = [quality.distance**power for quality in measured]
    drops = [lost(quality).points for quality in measured]
    squares = sum(distance**2 for distance in distances)
    factor = sum(d * x for d, x in zip(drops, distances, strict=True)) / squares if squares else 0.0
    return (most / factor) ** (1 / power) if factor > 0 else math.inf


def _by_drop(search: Search, best: dict[str, list[Candidate]], front: list[Measured]) -> dict[str, Measured]:
    if not front:
        return {}
    allowed = allowed_distance([each.quality for each in front], search.target.value)
    chosen: dict[str, Measured] = {}
    for method, candidates in best.items():
        own = [each for each in front if each.point.method == method]
        points = {str(each.point.arguments): each.point for each in own if each.quality.distance <= allowed}
        for candidate in candidates[:_FINALISTS]:
            for point in _towards(search, candidate, allowed):
                points[str(point.arguments)] = point
        if points:
            measured = search.measured(list(points.values()), _TURNS, "finalists")
            chosen[method] = max(measured, key=lambda each: each.speed.median)
    if not chosen:
        least = min(front, key=lambda each: each.quality.distance)
        raise ValueError(
            f"{search.target}: {lost(least.quality)} are lost even at {least.speed.median:.2f} times the dense speed"
        )
    return chosen


def _towards(search: Search, candidate: Candidate, allowed: float) -> list[Point]:
    """Points of a candidate within the allowed distance, ever nearer to it, by bisection on what they cost."""
    found: list[Point] = []
    low, high = min(search.target.levels), 0.97
    for _ in range(2 * _ADJUSTMENTS):
        level = (low + high) / 2
        point = search.solved(candidate, level)
        if point is None:
            low = level
        elif search.full_quality(point).distance <= allowed:
            found.append(point)
            high = level
        else:
            low = level
    return found[-1:]
