"""Schedules that remove t tokens per block, as the paper's comparison with ToMe on large models has them."""

from __future__ import annotations

from agglo.reproduce.classifiers import ATC, Entry
from agglo.reproduce.estimates import Size
from agglo.schedule import Constant, Linear, PerBlock, Schedule

KINDS = ("constant", "linear")
TOME = Entry("tome", "tome")
# The released code counts the class token among those that are left, so that a block removes one fewer.
ONE_FEWER = " as released"
EXACT = (TOME, *ATC)
RELEASED = tuple(Entry(f"{entry.name}{ONE_FEWER}", entry.method, entry.linkage) for entry in ATC)


def schedule_of(kind: str, t: int, size: Size, entry: Entry) -> Schedule | None:
    """What a method removes; None if that is nothing.

    ToMe removes at most half of the patches that a block has, as its own code does in silence. ATC leaves at least one.
    Entries of RELEASED remove t - 1 where t is asked for.
    """
    asked = (Constant(t) if kind == "constant" else Linear(t)).removals(size.depth)
    left, removed = size.patches, []
    for number in asked:
        if entry.method == "tome":
            number = min(number, left // 2)
        else:
            number = min(max(number - entry.name.endswith(ONE_FEWER), 0), left - 1)
        left -= number
        removed.append(number)
    return PerBlock(removed) if any(removed) else None
