"""How long a model takes as a function of its tokens: a staircase on many devices, and counts that stand well on it.

With too few tokens to fill a tile or a vector, a kernel computes what it throws away: a token more can cost much, and
a token less nothing. Counts move by up to half a step to where the device is faster than its own trend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_ALIGNED = 8  # tokens that the smallest tiles and vectors have in common
_FEWEST_STEPS, _MOST_STEPS = 4, 25
_SURE = 3.0  # standard errors by which two counts must differ


def counts_to_time(n_tokens: int, prefix: int, step: int) -> list[int]:
    """Patch counts that show a staircase: where all tokens, prefix included, are a multiple of the step, one more than
    that, where a new stair begins, and all.

    >>> counts_to_time(36, 1, 8)
    [7, 8, 15, 16, 23, 24, 31, 32, 36]
    """
    ends = range(step - prefix % step, n_tokens + 1, step)
    counts = {count for end in ends for count in (end, end + 1) if 1 <= count <= n_tokens}
    return sorted({*counts, n_tokens})


def steps_of(n_tokens: int, prefix: int) -> list[int]:
    """Steps between aligned counts, the smallest first: from few enough of them to be measured to so few that they show
    no stairs any more.

    >>> steps_of(196, 1), steps_of(4096, 0), steps_of(9, 0)
    ([8, 16, 32], [256, 512, 1024], [])
    """
    step = _ALIGNED
    while (n_tokens + prefix) // step > _MOST_STEPS:
        step *= 2
    found = []
    while (n_tokens + prefix) // step >= _FEWEST_STEPS:
        found.append(step)
        step *= 2
    return found


@dataclass(frozen=True)
class Latency:
    """counts: rising. seconds: of a pass in which all blocks have so many patch tokens. noise: their relative
    standard error.
    step: counts move by at most half of it."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    noise: float
    step: int

    @classmethod
    def of(cls, taken: Mapping[int, Sequence[float]], step: int) -> Latency:
        """From the seconds of two turns or more at each count."""
        counts = tuple(sorted(taken))
        medians = [float(np.median(taken[count])) for count in counts]
        # Turns of one count differ by chance alone: the standard error of the mean of one count, by those of all.
        variances = [np.var(taken[count], ddof=1) / np.mean(taken[count]) ** 2 for count in counts]
        noise = float(np.sqrt(np.mean(variances) / len(taken[counts[0]])))
        return cls(counts, tuple(medians), noise, step)

    @cached_property
    def _above(self) -> list[float]:
        trend = np.polynomial.Polynomial.fit(self.counts, self.seconds, deg=min(2, len(self.counts) - 1))
        return [seconds / float(trend(count)) - 1 for count, seconds in zip(self.counts, self.seconds, strict=True)]

    def above_trend(self, count: int) -> float:
        """How much longer than the trend, as a fraction of it: a parabola, since attention is quadratic and all else
        is linear. Between two counts that were timed, in a straight line."""
        return float(np.interp(count, self.counts, self._above))

    def snap(self, count: int) -> int:
        """The count where the device is fastest for its trend, if that is more than noise: within half a step, and
        within an eighth of the count, so that few tokens do not become far fewer."""
        near = [other for other in self.counts if abs(other - count) <= min(self.step / 2, count / 8)]
        if not near:
            return count
        best = min(near, key=lambda other: (self.above_trend(other), abs(other - count)))
        return best if self.above_trend(count) - self.above_trend(best) > _SURE * self.noise else count

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "seconds": list(self.seconds), "noise": self.noise, "step": self.step}
