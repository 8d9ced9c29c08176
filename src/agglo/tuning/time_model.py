"""How long a reduction will take, from those that were timed: good enough to start near a speed that is asked for.

Relative to the dense model, time = a + b GFLOPs + (what the method takes). The first two are shared by all. A method
takes so much per pair of tokens it may have compared, and each of its options so much more or less. Least squares over
all that was timed. What is chosen in the end is measured, never predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LITTLE = 1e-6  # keeps what was never timed at zero


@dataclass(frozen=True)
class Timed:
    """gflops: relative to dense. pairs: sum over reductions of (tokens before / all tokens) squared. traits: the method
    and each of its options. time: relative to dense."""

    gflops: float
    pairs: float
    traits: tuple[str, ...]
    time: float


class TimeModel:
    """Fitted to what was timed; the dense model is always among it."""

    def __init__(self, timed: Sequence[Timed]) -> None:
        known = [Timed(1.0, 0.0, (), 1.0), *timed]
        self._traits = sorted({trait for each in known for trait in each.traits})
        rows = np.array([self._row(each.gflops, each.pairs, each.traits) for each in known])
        times = np.array([each.time for each in known])
        little = _LITTLE * np.eye(rows.shape[1])
        self._weights = np.linalg.solve(rows.T @ rows + little, rows.T @ times)

    def predict(self, gflops: float, pairs: float, traits: Sequence[str]) -> float:
        """Time relative to the dense model's."""
        return float(self._row(gflops, pairs, traits) @ self._weights)

    def _row(self, gflops: float, pairs: float, traits: Sequence[str]) -> np.ndarray:
        return np.array([1.0, gflops, *(pairs * (trait in traits) for trait in self._traits)])
