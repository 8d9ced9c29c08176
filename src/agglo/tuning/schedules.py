"""Families of schedules: where they begin and end and how they fall, with one number left to say how far."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from agglo.schedule import Counts, Schedule, Stages


class NothingToReduceError(ValueError):
    """So many tokens are asked for that all of them stay."""


def counts_at(curve: str, start: int, last: int, stride: int, amount: float, n_tokens: int) -> dict[int, int]:
    """Patch tokens left after each reducing block: those from start to last, every stride-th.

    amount: fraction of n_tokens that is left in the end, in (0, 1].
    curve: "geometric" keeps the same fraction at every reduction, "constant" takes away the same number, "linear" takes
        away ever fewer: most at the first, as the schedule of that name.

    >>> counts_at("geometric", 3, 9, 3, 0.125, 196), counts_at("constant", 0, 3, 1, 0.5, 8)
    ({3: 98, 6: 49, 9: 24}, {0: 7, 1: 6, 2: 5, 3: 4})
    """
    if not 0 < amount <= 1:
        raise ValueError(f"amount={amount!r} must lie in (0, 1]")
    blocks = range(start, last + 1, stride)
    if not blocks:
        raise ValueError(f"a schedule from block {start} to block {last} has no block")
    counts = {}
    for number, block in enumerate(blocks, start=1):
        share = number / len(blocks)
        if curve == "geometric":
            left = amount**share
        elif curve == "constant":
            left = 1 - (1 - amount) * share
        elif curve == "linear":
            left = 1 - (1 - amount) * (1 - (1 - share) ** 2)
        else:
            raise ValueError(f"curve={curve!r} is not known; accepted: 'geometric', 'constant', 'linear'")
        counts[block] = max(1, int(n_tokens * left + 1e-9))
    return counts


def schedule_of(
    counts: dict[int, int], n_tokens: int, *, any_size: bool, snap: Callable[[int], int] = lambda count: count
) -> Schedule:
    """The schedule that leaves such counts, each moved by `snap`; blocks at which nothing would go are left out.

    any_size: as fractions of whatever number of tokens an image has, which leave these counts of n_tokens.

    >>> schedule_of({3: 98, 6: 98, 9: 24}, 196, any_size=False)
    Counts((98, 24), blocks=(3, 9))
    """
    falling: dict[int, int] = {}
    left = n_tokens
    for block, count in counts.items():
        moved = max(1, snap(count))
        if moved < left:
            falling[block] = left = moved
    if not falling:
        raise NothingToReduceError(f"a schedule that leaves all of {n_tokens} tokens reduces nothing")
    blocks = tuple(falling)
    if not any_size:
        return Counts(tuple(falling.values()), blocks=blocks)
    before = [n_tokens, *falling.values()]
    return Stages(tuple(after / first for first, after in pairwise(before)), blocks=blocks)
