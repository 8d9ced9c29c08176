"""How much work an item is, counted from its own cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agglo.hosts.common.base import Layout
from agglo.lab.paper.study import Cell
from agglo.schedule import Schedule

# What one GPU is assumed to get done: about what an A100 does with a ViT in mixed precision, data loading included.
MULTIPLY_ADDS_PER_SECOND = 1e13
TRAINING = 3  # passes that a step costs: forward, and backward to activations and weights

# What two cores get done with the embedded classifier: 190 images per second of 0.176 GFLOPs, as `agglo demo` timed it.
ON_TWO_CORES = 3e10
_COUNTED = "a training step counts as three passes, and the reduction itself as nothing"
ASSUMPTION = (
    f"GPU hours: multiply-adds of all passes at {MULTIPLY_ADDS_PER_SECOND / 1e12:g} x 10^12 per second on one GPU; "
    f"{_COUNTED}"
)
MINIATURE_ASSUMPTION = (
    f"hours: multiply-adds of all passes at {ON_TWO_CORES / 1e9:g} x 10^9 per second on two cores; {_COUNTED}"
)


@dataclass(frozen=True)
class Size:
    """A plain vision transformer in numbers. patches: tokens of an image without its class token."""

    width: int
    depth: int
    patches: int = 196
    mlp_ratio: int = 4

    def multiply_adds(self, schedule: Schedule | None = None) -> float:
        """Of one pass of one image; None is the dense model."""
        layout = Layout(
            depth=self.depth,
            prefix=1,
            patches=self.patches,
            attention_weights=4 * self.width**2,
            attention_width=self.width,
            mlp_weights=2 * self.mlp_ratio * self.width**2,
        )
        dense = [self.patches] * self.depth
        counts = dense if schedule is None else schedule.counts(self.patches, self.depth)
        return 1e9 * layout.gflops(counts, self.patches)


TINY, SMALL, BASE = Size(192, 12), Size(384, 12), Size(768, 12)
LARGE, HUGE = Size(1024, 24), Size(1280, 32, patches=256)


def hours_of(cells: Iterable[Cell], per_second: float = MULTIPLY_ADDS_PER_SECOND) -> float:
    return sum(cell.multiply_adds for cell in cells) / per_second / 3600


def in_words(cells: Sequence[Cell], per_second: float = MULTIPLY_ADDS_PER_SECOND) -> str:
    """Hours at so many multiply-adds per second.

    >>> in_words([Cell({}, multiply_adds=3.6e17)]), in_words([Cell({}, multiply_adds=1e10)]), in_words([])
    ('10', 'under 0.1', 'none')
    """
    hours = hours_of(cells, per_second)
    if not hours:
        return "none"
    return "under 0.1" if hours < 0.1 else f"{hours:.1f}" if hours < 10 else f"{hours:,.0f}"
