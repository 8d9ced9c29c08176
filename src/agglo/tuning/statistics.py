"""What images can show: means and their standard errors, paired differences, and who is dominated by whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")
SURE = 2.0  # standard errors that make a promise


@dataclass(frozen=True)
class Quality:
    """Sums over images, which add up: of the distance to the dense output, and where there is a decision to compare.

    differing: images whose decision is not the dense model's; None where outputs are no decisions.
    lost, gained: images that only the dense model, and only the reduced one, got right; None without labels.
    """

    images: int
    total: float
    squares: float
    differing: int | None = None
    lost: int | None = None
    gained: int | None = None

    def __add__(self, other: Quality) -> Quality:
        def add(name: str) -> Any:
            mine, its = getattr(self, name), getattr(other, name)
            return None if mine is None or its is None else mine + its

        return Quality(**{field.name: add(field.name) for field in fields(self)})

    @property
    def distance(self) -> float:
        return self.total / self.images

    @property
    def distance_error(self) -> float:
        """Standard error of the mean distance; infinite for one image."""
        if self.images < 2:
            return math.inf
        variance = (self.squares - self.total**2 / self.images) / (self.images - 1)
        return math.sqrt(max(variance, 0.0) / self.images)

    @property
    def drop(self) -> Drop | None:
        """Accuracy lost; None without labels."""
        if self.lost is None or self.gained is None:
            return None
        return Drop.paired(self.lost, self.gained, self.images)

    @property
    def disagreement(self) -> Drop | None:
        """Decisions that changed: no more accuracy can be lost than that. None where outputs are no decisions."""
        return None if self.differing is None else Drop.paired(self.differing, 0, self.images)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Drop:
    """points: of accuracy lost, in percent of the images. error: its standard error."""

    points: float
    error: float
    images: int

    @classmethod
    def paired(cls, lost: int, gained: int, images: int) -> Drop:
        """Each image lost, gained or neither: the error is that of the mean of -1, 0 and 1, and at least what it would
        be had one image been lost, since images on which nothing happened do not prove that nothing can."""
        mean = (lost - gained) / images
        variance = max((lost + gained) / images - mean**2, 1 / images - 1 / images**2)
        return cls(100 * mean, 100 * math.sqrt(variance / images), images)

    def __str__(self) -> str:
        return f"{self.points:.2f} +- {self.error:.2f} points"

    def within(self, most: float) -> bool | None:
        """Whether no more than so many points are lost, two standard errors away from doubt; None if in doubt."""
        if self.points + SURE * self.error <= most:
            return True
        return False if self.points - SURE * self.error > most else None

    def images_needed(self, most: float) -> int | None:
        """So many images would show that no more is lost, if it stays at these points; None if it is lost already."""
        room = most - self.points
        if room <= 0:
            return None
        return math.ceil(self.images * (SURE * self.error / room) ** 2)


def pareto(points: Iterable[T], *, gain: Callable[[T], float], loss: Callable[[T], float]) -> list[T]:
    """The points that no other one beats in one and equals or beats in the other, by rising gain; of equal ones the
    first."""
    found: list[T] = []
    for point in sorted(points, key=lambda point: (-gain(point), loss(point))):
        if not found or loss(point) < loss(found[-1]):
            found.append(point)
    return found[::-1]


def quality_from(content: Mapping[str, Any]) -> Quality:
    """A quality from what its `as_dict` gave."""
    return Quality(**{field.name: content[field.name] for field in fields(Quality)})
