"""What images can show: means and their standard errors, and paired differences."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

SURE = 2.0  # standard errors that make a promise


@dataclass(frozen=True)
class Quality:
    """How near a reduced model's outputs are to the dense model's: sums over images, so that parts add up.

    Attributes:
        images: Number of images.
        total: Sum of the distances to the dense outputs.
        squares: Sum of their squares.
        differing: Images whose top class is not the dense model's; None if outputs are not logits.
        lost: Images that only the dense model classifies correctly; None without labels.
        gained: Images that only the reduced model classifies correctly; None without labels.
    """

    images: int
    total: float
    squares: float
    differing: int | None = None
    lost: int | None = None
    gained: int | None = None

    def __add__(self, other: Quality) -> Quality:
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Quality(*sums)

    @property
    def distance(self) -> float:
        """The mean distance to the dense output; never below 0, where rounding can take a KL divergence."""
        return max(self.total / self.images, 0.0)

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
        return None if self.lost is None else Drop.paired(self.lost, self.gained or 0, self.images)

    @property
    def disagreement(self) -> Drop | None:
        """Decisions that changed, an upper bound of the accuracy lost; None if outputs are not logits."""
        return None if self.differing is None else Drop.paired(self.differing, 0, self.images)

    @property
    def loss(self) -> Drop:
        """What `max_drop` is about: accuracy where there are labels, otherwise decisions that changed."""
        found = self.drop or self.disagreement
        assert found is not None
        return found


@dataclass(frozen=True)
class Drop:
    """Accuracy lost, with its standard error, both in percentage points."""

    points: float
    error: float

    @classmethod
    def paired(cls, lost: int, gained: int, images: int) -> Drop:
        """Return the drop of images that are each lost, gained or neither.

        The error is that of the mean of -1, 0 and 1, and at least what it would be had one image been lost: images on
        which nothing happened do not prove that nothing can.
        """
        mean = (lost - gained) / images
        variance = max((lost + gained) / images - mean**2, 1 / images - 1 / images**2)
        return cls(100 * mean, 100 * math.sqrt(variance / images))

    def __str__(self) -> str:
        return f"{self.points:.2f} +- {self.error:.2f}"

    def within(self, most: float) -> bool | None:
        """Return whether at most so many points are lost, by two standard errors; None if neither is shown."""
        if self.points + SURE * self.error <= most:
            return True
        return False if self.points - SURE * self.error > most else None
