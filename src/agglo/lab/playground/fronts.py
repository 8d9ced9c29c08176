"""What `agglo tune` found, as points of a curve: ready-made results, and those that a file holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agglo import tuned as ready_made
from agglo.config import ReductionConfig
from agglo.lab.playground.settings import Chosen
from agglo.tuning.objectives import TITLES
from agglo.tuning.statistics import Quality

SPEED, GFLOPS = "speed", "GFLOPs"
AXES = {SPEED: "times as fast as dense", GFLOPS: "times fewer GFLOPs than dense"}
_MARK = "#"  # between the name of a result and the number of a point


def without_folders(name: str) -> str:
    """Return the last part of a model's name: visitors are to see no path of the machine.

    >>> without_folders("hf:/home/anna/vit/"), without_folders("deit_tiny_patch16_224")
    ('vit', 'deit_tiny_patch16_224')
    """
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


@dataclass(frozen=True)
class Point:
    """One schedule with its options."""

    config: ReductionConfig
    counts: Sequence[int]  # patch tokens after each block
    gflops: float  # fraction of the dense model's
    speed: float  # times dense, the median of its turns
    speed_range: tuple[float, float]  # half of the turns lie within
    quality: Quality
    is_answer: bool  # whether the search chose it

    @property
    def method(self) -> str:
        return self.config.method

    def x(self, axis: str) -> float:
        return self.speed if axis == SPEED else 1 / self.gflops


@dataclass(frozen=True)
class Front:
    """A result of `agglo tune`."""

    name: str
    model: str  # its name as typed, which may hold folders: `title` is for visitors
    objective: str  # what the distance to the dense output is
    accuracy: float | None  # of the dense model, in percent; None without labels
    points: tuple[Point, ...]
    where: str  # it was measured

    @property
    def title(self) -> str:
        return without_folders(self.model)

    @property
    def y_label(self) -> str:
        return TITLES.get(self.objective, self.objective) if self.accuracy is None else "accuracy (%)"

    def y(self, point: Point) -> tuple[float, float]:
        """Return accuracy in percent, or the distance to the dense output, with its standard error."""
        drop = point.quality.drop
        if self.accuracy is not None and drop is not None:
            return self.accuracy - drop.points, drop.error
        return point.quality.distance, point.quality.distance_error

    def points_along(self, axis: str) -> list[Point]:
        return sorted(self.points, key=lambda point: point.x(axis))

    def quality(self, point: Point) -> str:
        """Return the height of a point, with its name and its standard error."""
        y, error = self.y(point)
        return f"{self.y_label} {y:.4g} ± {error:.2g}"

    def note(self, point: Point) -> str:
        """Return a description of a point."""
        chosen = ", what the search chose" if point.is_answer else ""
        return (
            f"{point.method}: {point.counts[-1]} tokens at the end, {point.gflops:.2f} of the GFLOPs, "
            f"{point.speed:.2f} times as fast, {self.quality(point)}{chosen}"
        )

    def chosen(self, number: int) -> Chosen:
        """Return a point as a reduction; ValueError if there is none of that number."""
        if not 0 <= number < len(self.points):
            raise ValueError(f"{self.name} has no point {number}; there are 0 to {len(self.points) - 1}")
        point = self.points[number]
        title = f"tuned {point.method}, {point.gflops:.2f} of the GFLOPs"
        ready = self.name if point.is_answer and self.name in ready_made.names() else None
        return Chosen(title, point.config, ready)

    def reference(self, number: int) -> str:
        """Return the text by which other tabs name a point: see `Fronts.resolve`."""
        return f"{self.name}{_MARK}{number}"


class Fronts:
    """All results the page knows, by name: the ready-made ones, and files of `agglo tune`."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        found = [read(source) for source in (*ready_made.names(), *map(str, files))]
        self.by_name = {front.name: front for front in found}

    def named(self, name: str) -> Front:
        if name not in self.by_name:
            raise ValueError(f"There is no result {name[:60]!r}; there are {', '.join(self.by_name)}.")
        return self.by_name[name]

    def resolve(self, reference: str) -> Chosen | None:
        """Return the reduction that a reference such as "agglo_fashion_vit-half#3" names; None if it is none."""
        name, mark, number = reference.rpartition(_MARK)
        return self.named(name).chosen(int(number)) if mark and number.isdecimal() else None


def read(source: str) -> Front:
    """Read a ready-made result by its name, or a file."""
    content = ready_made.read(source)
    ready_made.config(source)  # raises for a search that was stopped
    points: list[Point] = []
    for each in (content["chosen"], *content["beside"], *content["front"]):
        config, speed, quality = ReductionConfig.from_dict(each["config"]), each["speed"], Quality(**each["search"])
        if all(config != point.config for point in points):
            middle, around = speed["median"], (speed["low"], speed["high"])
            points.append(Point(config, each["counts"], each["gflops"], middle, around, quality, not points))
    machine, settings = content["machine"], content["settings"]
    threads = "1 thread" if settings["threads"] == 1 else f"{settings['threads']} threads"
    data = f"batches of {content['data']['batch_size']}, {content['data']['search']} images"
    where = f"{machine['gpu'] or machine['cpu']}, {threads}, {data}, {machine['date'][:10]}"
    name = source if source in ready_made.names() else Path(source).stem
    model, accuracy = content["model"]["name"], content["dense"]["accuracy"]
    return Front(name, model, settings["objective"], accuracy, tuple(points), where)
