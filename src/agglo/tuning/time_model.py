"""How long a reduction will take, from those that were timed: good enough to start near a speed that is asked for.

Relative to the dense model, time = 1 - b (1 - GFLOPs) + (what the method takes). b is shared by all. A method takes so
much per pair of tokens it may have compared, and each of its options so much more or less; altogether never less than
nothing. Least absolute deviations over all that was timed: where others use the machine too, a few timings are far
off, and least squares would follow them. What is chosen in the end is measured, never predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LITTLE = 1e-6  # keeps what was never timed at zero
_EXACT = 1e-4  # deviations below it count alike
_ROUNDS = 50
_FREE = 1.0  # b before anything was timed: time falls as GFLOPs do


@dataclass(frozen=True)
class Timed:
    """gflops: relative to dense. pairs: sum over reductions of (tokens before / all tokens) squared. traits: the method
    and each of its options. time: relative to dense."""

    gflops: float
    pairs: float
    traits: tuple[str, ...]
    time: float


class TimeModel:
    """Fitted to what was timed; the dense model, which all is relative to, is met exactly."""

    def __init__(self, timed: Sequence[Timed]) -> None:
        self._traits = sorted({trait for each in timed for trait in each.traits})
        if not timed:
            self._weights = np.array([_FREE])
            return
        rows = np.array([self._row(each.gflops, each.pairs, each.traits) for each in timed])
        times = np.array([each.time - 1.0 for each in timed])
        self._weights = _least_deviations(rows, times)

    def predict(self, gflops: float, pairs: float, traits: Sequence[str]) -> float:
        """Time relative to the dense model's."""
        free, *method = self._row(gflops, pairs, traits) * self._weights
        return float(1.0 + free + max(0.0, sum(method)))

    def _row(self, gflops: float, pairs: float, traits: Sequence[str]) -> np.ndarray:
        return np.array([gflops - 1.0, *(pairs * (trait in traits) for trait in self._traits)])


def _least_deviations(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares again and again, each time with less weight on what was far off."""
    little = _LITTLE * np.eye(rows.shape[1])
    trust = np.ones(len(rows))
    for _ in range(_ROUNDS):
        weighted = rows * trust[:, None]
        weights = np.linalg.solve(weighted.T @ rows + little, weighted.T @ values)
        trust = _EXACT / np.maximum(np.abs(rows @ weights - values), _EXACT)
    return weights
