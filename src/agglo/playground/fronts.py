"""What `agglo tune` found, as points of a curve: ready-made results, and those that a file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agglo import tuned as ready_made
from agglo.drawing.scatter import Dot
from agglo.playground.naming import without_folders
from agglo.playground.settings import Chosen
from agglo.tuning.objectives import TITLES
from agglo.tuning.statistics import Quality, quality_from

SPEED, GFLOPS = "speed", "GFLOPs"
AXES = {SPEED: "times as fast as dense", GFLOPS: "times fewer GFLOPs than dense"}
_MARK = "#"  # between the name of a result and the number of a point


@dataclass(frozen=True)
class Point:
    """One schedule with its options. is_answer: what the search chose."""

    method: str
    arguments: Mapping[str, Any]
    counts: Sequence[int]
    gflops: float
    speed: float
    speed_range: tuple[float, float]
    quality: Quality
    is_answer: bool


@dataclass(frozen=True)
class Front:
    """A result. model: its name as typed, which may hold folders: `title` is for visitors. accuracy: of the dense
    model, in percent; None without labels. where: it was measured."""

    name: str
    model: str
    objective: str
    accuracy: float | None
    points: tuple[Point, ...]
    where: str

    @property
    def title(self) -> str:
        """The name of the model, without folders."""
        return without_folders(self.model)

    @property
    def y_label(self) -> str:
        if self.accuracy is not None:
            return "accuracy (%)"
        return f"{TITLES.get(self.objective, self.objective)}"

    def height(self, point: Point) -> tuple[float, float]:
        """Accuracy in percent, or the distance to the dense output, with its standard error."""
        drop = point.quality.drop
        if self.accuracy is not None and drop is not None:
            return self.accuracy - drop.points, drop.error
        return point.quality.distance, point.quality.distance_error

    def height_text(self, point: Point) -> str:
        y, error = self.height(point)
        if self.accuracy is not None:
            return f"accuracy {y:.2f} ± {error:.2f}"
        return f"{self.y_label} {y:.4g} ± {error:.2g}"

    def dots(self, axis: str) -> list[Dot]:
        """For `drawing.scatter`, in the order of the points."""
        found = []
        for point in self.points:
            y, error = self.height(point)
            x = point.speed if axis == SPEED else 1 / point.gflops
            found.append(Dot(point.method, x, y, error, self.note(point), point.is_answer))
        return found

    def note(self, point: Point) -> str:
        """A point in words."""
        chosen = ", what the search chose" if point.is_answer else ""
        return (
            f"{point.method}: {point.counts[-1]} tokens at the end, {point.gflops:.2f} of the GFLOPs, "
            f"{point.speed:.2f} times as fast, {self.height_text(point)}{chosen}"
        )

    def chosen(self, number: int) -> Chosen:
        """A point as a reduction; ValueError if there is none of that number."""
        if not 0 <= number < len(self.points):
            raise ValueError(f"{self.name} has no point {number}; there are 0 to {len(self.points) - 1}")
        point = self.points[number]
        title = f"tuned {point.method}, {point.gflops:.2f} of the GFLOPs"
        ready = self.name if point.is_answer and self.name in ready_made.names() else None
        return Chosen(title, point.arguments, ready)

    def reference(self, number: int) -> str:
        """By which other tabs name a point: see `Fronts.resolve`."""
        return f"{self.name}{_MARK}{number}"


class Fronts:
    """All results the page knows, by name. files: of `agglo tune`, beside the ready-made ones."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self.by_name = {name: read(name) for name in ready_made.names()}
        for path in files:
            found = read(str(path))
            self.by_name[found.name] = found

    def named(self, name: str) -> Front:
        if name not in self.by_name:
            raise ValueError(f"There is no result {name[:60]!r}; there are {', '.join(self.by_name)}.")
        return self.by_name[name]

    def resolve(self, reference: str) -> Chosen | None:
        """The reduction that a reference such as "agglo_fashion_vit-half#3" names; None if it is no reference."""
        name, mark, number = reference.rpartition(_MARK)
        if not mark or not number.isdecimal():
            return None
        return self.named(name).chosen(int(number))


def read(source: str) -> Front:
    """A ready-made result by its name, or a file."""
    content = ready_made.read(source)
    ready_made.arguments(source)  # raises for a search that was stopped
    chosen = content["chosen"]
    points = [chosen, *content["beside"], *content["front"]]
    seen: list[Mapping[str, Any]] = []
    found = []
    for point in points:
        if point["apply"] in seen:
            continue
        seen.append(point["apply"])
        found.append(_point(point, is_answer=point is chosen))
    machine, settings = content["machine"], content["settings"]
    threads = "1 thread" if settings["threads"] == 1 else f"{settings['threads']} threads"
    data = f"batches of {content['data']['batch_size']}, {content['data']['search']} images"
    where = f"{machine['gpu'] or machine['cpu']}, {threads}, {data}, {machine['date'][:10]}"
    name = source if source in ready_made.names() else Path(source).stem
    return Front(
        name, content["model"]["name"], settings["objective"], content["dense"]["accuracy"], tuple(found), where
    )


def _point(content: Mapping[str, Any], *, is_answer: bool) -> Point:
    speed = content["speed"]
    return Point(
        content["method"],
        content["apply"],
        content["counts"],
        content["gflops"],
        speed["median"],
        (speed["low"], speed["high"]),
        quality_from(content["search"]),
        is_answer,
    )
