"""The kinds of schedules there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from agglo.schedule.base import (
    Form,
    Rates,
    Ratio,
    WrittenSchedule,
    as_ratio,
    as_whole,
    as_wholes,
    default_blocks,
    require_flag,
)


class _AtStages(WrittenSchedule):
    """Reduces at a few blocks, each the start of a stage."""

    blocks: Sequence[int] | None

    @abstractmethod
    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        """Patch tokens left after each stage."""

    def _blocks(self, depth: int) -> tuple[int, ...]:
        return default_blocks(depth, 3 if self.returning else 4) if self.blocks is None else tuple(self.blocks)

    def starts(self, n_tokens: int, depth: int) -> list[int]:
        return list(self._blocks(depth))

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        blocks = self._blocks(depth)
        if blocks[-1] >= depth:
            raise ValueError(f"blocks={blocks} do not fit a model of depth {depth}: 0 to {depth - 1} exist")
        after_stage = self._after_stages(n_tokens, len(blocks))
        counts, current = [], n_tokens
        for block in range(depth):
            if block in blocks:
                current = after_stage[blocks.index(block)]
            counts.append(current)
        return counts

    def _check_blocks(self, n_stages: int | None) -> None:
        """n_stages: how many the schedule has numbers for; None for any number of them."""
        if self.blocks is None:
            return
        blocks = as_wholes("blocks", self.blocks)
        if any(a >= b for a, b in pairwise(blocks)):
            raise ValueError(f"blocks={blocks} must increase")
        if n_stages is not None and n_stages != len(blocks):
            raise ValueError(f"{n_stages} stages do not fit blocks={blocks}: give one value per block")
        _set(self, "blocks", blocks)


@dataclass(frozen=True, repr=False)
class Stages(_AtStages):
    """Reduce at a few blocks, as the paper does.

    keep_rate: the fraction that stays at each stage: one for all, or one per stage.
    blocks: 0-based; None means a quarter, a half and three quarters of the depth (3, 6, 9 of 12).
    nested: False takes int(N r1 r2 ...) of the initial count N; True takes int(r n) of the count n at hand, so that
        roundings add up, as the paper's detectors do.
    returning: every stage takes int(N r) of all tokens, by default at a third and two thirds of the depth (4, 8 of 12),
        for methods whose tokens return after a stage.

    >>> Stages(0.5).counts(196, 12)
    [196, 196, 196, 98, 98, 98, 49, 49, 49, 24, 24, 24]
    >>> Stages((0.9, 0.7), blocks=(2, 4)).counts(100, 6)
    [100, 100, 90, 90, 63, 63]
    """

    form: ClassVar[Form] = Form(
        "stages",
        "keep_rate",
        "blocks",
        ("nested", "returning"),
        ("stages:0.5", "stages:0.9,0.7,0.5@3,6,9", "stages:0.7:nested", "stages:0.5@4,8:returning"),
    )
    keep_rate: Rates
    blocks: Sequence[int] | None = None
    nested: bool = field(default=False, kw_only=True)
    returning: bool = field(default=False, kw_only=True)
    _ratios: tuple[Ratio, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        is_one = isinstance(self.keep_rate, (int, float, str))
        rates: Any = (self.keep_rate,) if is_one else tuple(self.keep_rate)  # type: ignore[arg-type]
        if not rates:
            raise ValueError(f"keep_rate={self.keep_rate!r} must be a keep rate, or one per stage")
        _set(self, "_ratios", tuple(as_ratio("keep_rate", rate) for rate in rates))
        _set(self, "keep_rate", float(rates[0]) if is_one else tuple(map(float, rates)))
        self._check_blocks(None if is_one else len(rates))
        require_flag("nested", self.nested)
        require_flag("returning", self.returning)
        if self.nested and self.returning:
            raise ValueError("nested counts what is at hand and returning all tokens: give one of them")

    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        ratios = self._ratios * n_stages if isinstance(self.keep_rate, float) else self._ratios
        if len(ratios) != n_stages:
            raise ValueError(f"keep_rate={self.keep_rate} needs {n_stages} values, one per stage")
        counts = []
        numerator, denominator = n_tokens, 1
        for top, bottom in ratios:
            numerator, denominator = numerator * top, denominator * bottom
            if self.nested:
                numerator, denominator = numerator // denominator, 1
            counts.append(numerator // denominator)
            if self.returning:
                numerator, denominator = n_tokens, 1
        return counts


@dataclass(frozen=True, repr=False)
class Counts(_AtStages):
    """So many patch tokens are left after each stage, whatever their number before. For one image size.

    left: after each stage.
    blocks, returning: as for `Stages`. With all blocks listed, the counts are those after each block.

    >>> Counts((90, 30, 10)).counts(196, 12)
    [196, 196, 196, 90, 90, 90, 30, 30, 30, 10, 10, 10]
    """

    form: ClassVar[Form] = Form(
        "counts", "left", "blocks", ("returning",), ("counts:90,30,10", "counts:90,30,10@3,6,9")
    )
    left: Sequence[int]
    blocks: Sequence[int] | None = None
    returning: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _set(self, "left", as_wholes("left", self.left, least=1))
        self._check_blocks(len(self.left))
        require_flag("returning", self.returning)

    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        if len(self.left) != n_stages:
            raise ValueError(f"left={self.left} needs {n_stages} values, one per stage")
        return list(self.left)


class _Removing(WrittenSchedule):
    """Removes a number of patch tokens at every block."""

    @abstractmethod
    def removals(self, depth: int) -> list[int]:
        """Patch tokens removed at each of `depth` blocks."""

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        counts = []
        for removed in self.removals(depth):
            n_tokens = n_tokens - removed
            counts.append(n_tokens)
        return counts


@dataclass(frozen=True, repr=False)
class PerBlock(_Removing):
    """Any list of patch tokens removed at each block; blocks beyond a short list remove none.

    >>> PerBlock((0, 30, 0, 20)).counts(100, 6)
    [100, 70, 70, 50, 50, 50]
    """

    form: ClassVar[Form] = Form("blocks", "removed", None, (), ("blocks:0,0,0,49,0,0,49",))
    removed: Sequence[int]

    def __post_init__(self) -> None:
        _set(self, "removed", as_wholes("removed", self.removed))

    def removals(self, depth: int) -> list[int]:
        if len(self.removed) > depth:
            raise ValueError(f"{self!r} lists {len(self.removed)} blocks, the model has {depth}")
        return list(self.removed) + [0] * (depth - len(self.removed))


@dataclass(frozen=True, repr=False)
class Constant(_Removing):
    """t patch tokens removed at every block from `start` on.

    >>> Constant(10, start=2).counts(100, 5)
    [100, 100, 90, 80, 70]
    """

    form: ClassVar[Form] = Form("constant", "t", "start", (), ("constant:14", "constant:14@3"))
    t: int
    start: int = 0

    def __post_init__(self) -> None:
        as_whole("t", self.t)
        as_whole("start", self.start)

    def removals(self, depth: int) -> list[int]:
        _require_start(self, self.start, depth)
        return [self.t if block >= self.start else 0 for block in range(depth)]


@dataclass(frozen=True, repr=False)
class Linear(_Removing):
    """floor(2t - 2tl / (L - 1)) patch tokens removed at block l of L: 2t at the first, none at the last.

    >>> Linear(16).removals(12)
    [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    """

    form: ClassVar[Form] = Form("linear", "t", None, (), ("linear:16",))
    t: int

    def __post_init__(self) -> None:
        as_whole("t", self.t)

    def removals(self, depth: int) -> list[int]:
        last = depth - 1
        return [2 * self.t * (last - block) // last if last else self.t for block in range(depth)]


@dataclass(frozen=True, repr=False)
class Geometric(WrittenSchedule):
    """The same fraction stays at every block from `start` on: int(N r^m) after the m-th of them.

    >>> Geometric(0.5, start=1).counts(100, 4)
    [100, 50, 25, 12]
    """

    form: ClassVar[Form] = Form("geometric", "keep_rate", "start", (), ("geometric:0.8", "geometric:0.8@0"))
    keep_rate: float
    start: int = 3
    _ratio: Ratio = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, "_ratio", as_ratio("keep_rate", self.keep_rate))
        _set(self, "keep_rate", float(self.keep_rate))
        as_whole("start", self.start)

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        _require_start(self, self.start, depth)
        counts = []
        numerator, denominator = n_tokens, 1
        for block in range(depth):
            if block >= self.start:
                numerator, denominator = numerator * self._ratio[0], denominator * self._ratio[1]
            counts.append(numerator // denominator)
        return counts


def _set(schedule: WrittenSchedule, name: str, value: Any) -> None:
    """What a frozen dataclass may do to itself while it is being made."""
    object.__setattr__(schedule, name, value)


def _require_start(schedule: WrittenSchedule, start: int, depth: int) -> None:
    if start >= depth:
        raise ValueError(f"{schedule!r} would start at block {start} of a model of depth {depth}: it would do nothing")
