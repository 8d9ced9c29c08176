"""Successive halving: many candidates on few images, the better half of them on twice as many, and so on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

C = TypeVar("C")


def rungs_of(images: int, least: int) -> list[int]:
    """Images of each round: doubled up to all of them, beginning with at least `least`.

    >>> rungs_of(200, 32), rungs_of(20, 32)
    ([50, 100, 200], [20])
    """
    rungs = [images]
    while rungs[0] // 2 >= least:
        rungs.insert(0, -(-rungs[0] // 2))
    return rungs


def halving(
    candidates: Sequence[C],
    rungs: Sequence[int],
    evaluate: Callable[[Sequence[C], int], dict[C, float]],
    breed: Callable[[Sequence[C], int], Sequence[C]] = lambda best, count: (),
) -> list[C]:
    """The candidates of the last round, least value first. Half of them stay from round to round, and at least two.

    evaluate: values of candidates on so many images; one that has none is out.
    breed: given those that stay, best first, up to so many new ones, which take the places of the last of them.
    """
    best = list(dict.fromkeys(candidates))
    for number, images in enumerate(rungs):
        if number:
            count = max(2, math.ceil(len(best) / 2))
            new = [candidate for candidate in breed(best[:count], count // 3) if candidate not in best]
            best = [*best[: count - len(new)], *new]
        values = evaluate(best, images)
        best = sorted((candidate for candidate in best if candidate in values), key=lambda c: values[c])
    return best
