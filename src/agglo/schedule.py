"""How many patch tokens are left after each block. Prefix tokens are never counted.

All arithmetic is on integers: a rate is a ratio of two, so that 0.7 of 100 tokens twice is 49, not the 48 that
floating point makes of it, and torch.compile can follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction

Rates = float | Sequence[float]


class Schedule(ABC):
    """A plan for any number of tokens and any depth.

    returning: whether counts may rise again, for methods whose tokens return.
    """

    returning: bool = False

    @abstractmethod
    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        """Patch tokens left after each block, unchecked."""

    def counts(self, n_tokens: int, depth: int) -> list[int]:
        """Patch tokens left after each of `depth` blocks, starting from n_tokens; ValueError if none would be left.

        >>> Stages(0.5).counts(196, 12)
        [196, 196, 196, 98, 98, 98, 49, 49, 49, 24, 24, 24]
        """
        wanted = self._wanted(n_tokens, depth)
        current = n_tokens
        for block, count in enumerate(wanted):
            if count < 1:
                raise ValueError(
                    f"{self!r} would leave {count} of {n_tokens} patch tokens after block {block}; at least 1 must stay"
                )
            if count > current and not (self.returning and count <= n_tokens):
                raise ValueError(
                    f"{self!r} asks for {count} patch tokens after block {block}, but only {current} are left there"
                )
            current = count
        return wanted

    def starts(self, n_tokens: int, depth: int) -> list[int]:
        """Blocks at which a stage begins: where the count changes, unless the schedule has stages of its own."""
        counts = [n_tokens, *self.counts(n_tokens, depth)]
        return [block for block in range(depth) if counts[block + 1] != counts[block]]


def _ratio(name: str, rate: float) -> tuple[int, int]:
    """A keep rate as numerator and denominator: 0.7 is 7/10 and 1/3 is 1/3, whatever their binary expansion."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        raise ValueError(f"{name}={rate!r} is not a keep rate: the fraction of tokens that stays, above 0 and up to 1")
    return Fraction(rate).limit_denominator(10**9).as_integer_ratio()


def _whole(name: str, value: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")
    return value


def _require_start(schedule: Schedule, start: int, depth: int) -> None:
    if start >= depth:
        raise ValueError(f"{schedule!r} would start at block {start} of a model of depth {depth}: it would do nothing")


def default_blocks(depth: int, parts: int = 4) -> tuple[int, ...]:
    """The paper's blocks 3, 6 and 9 of 12, at the same fractions of any depth; 4 and 8 if it is cut in three parts.

    >>> default_blocks(12), default_blocks(24), default_blocks(12, 3)
    ((3, 6, 9), (6, 12, 18), (4, 8))
    """
    return tuple(sorted({depth * part // parts for part in range(1, parts)}))


class Stages(Schedule):
    """Reduce at a few blocks, as the paper does.

    keep_rate: the fraction that stays at each stage: one for all, or one per stage.
    blocks: 0-based; None means a quarter, a half and three quarters of the depth (3, 6, 9 of 12).
    counts: instead of keep_rate: patch tokens left after each stage.
    nested: False takes int(N r1 r2 ...) of the initial count N; True takes int(r n) of the count n at hand, so that
        roundings add up, as the paper's detectors do.
    returning: every stage takes int(N r) of all tokens, by default at a third and two thirds of the depth (4, 8 of 12),
        for methods whose tokens return after a stage.
    """

    def __init__(
        self,
        keep_rate: Rates | None = None,
        blocks: Sequence[int] | None = None,
        *,
        counts: Sequence[int] | None = None,
        nested: bool = False,
        returning: bool = False,
    ) -> None:
        if (keep_rate is None) == (counts is None):
            raise ValueError(f"give either keep_rate or counts, not {'neither' if counts is None else 'both'}")
        self.blocks = None if blocks is None else tuple(_whole("blocks", block) for block in blocks)
        if self.blocks is not None and any(a >= b for a, b in zip(self.blocks, self.blocks[1:], strict=False)):
            raise ValueError(f"blocks={tuple(self.blocks)} must increase")
        self.keep_rate = keep_rate
        self.stage_counts = None if counts is None else tuple(_whole("counts", count, least=1) for count in counts)
        if nested and returning:
            raise ValueError("nested counts what is at hand and returning all tokens: give one of them")
        self.nested, self.returning = nested, returning
        one_rate = isinstance(keep_rate, (int, float))
        rates: Sequence[float] = () if keep_rate is None else (keep_rate,) if one_rate else tuple(keep_rate)  # type: ignore[assignment, arg-type]
        self._ratios = tuple(_ratio("keep_rate", rate) for rate in rates)
        self._one_rate = one_rate
        listed = self.stage_counts if keep_rate is None else None if one_rate else self._ratios
        if listed is not None and self.blocks is not None and len(listed) != len(self.blocks):
            raise ValueError(f"{len(listed)} stages do not fit blocks={self.blocks}: give one value per block")

    def __repr__(self) -> str:
        what = f"counts={self.stage_counts}" if self.keep_rate is None else repr(self.keep_rate)
        blocks = "" if self.blocks is None else f", blocks={self.blocks}"
        more = ", nested=True" if self.nested else ", returning=True" if self.returning else ""
        return f"Stages({what}{blocks}{more})"

    def _blocks(self, depth: int) -> tuple[int, ...]:
        if self.blocks is None:
            return default_blocks(depth, 3 if self.returning else 4)
        return self.blocks

    def starts(self, n_tokens: int, depth: int) -> list[int]:
        return list(self._blocks(depth))

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        blocks = self._blocks(depth)
        if blocks and blocks[-1] >= depth:
            raise ValueError(f"blocks={blocks} do not fit a model of depth {depth}: 0 to {depth - 1} exist")
        after_stage = self._after_stages(n_tokens, len(blocks))
        counts, current = [], n_tokens
        for block in range(depth):
            if block in blocks:
                current = after_stage[blocks.index(block)]
            counts.append(current)
        return counts

    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        if self.stage_counts is not None:
            if len(self.stage_counts) != n_stages:
                raise ValueError(f"counts={self.stage_counts} needs {n_stages} values, one per stage")
            return list(self.stage_counts)
        ratios = self._ratios * n_stages if self._one_rate else self._ratios
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


class PerBlock(Schedule):
    """Any list of patch tokens removed at each block; blocks beyond a short list remove none."""

    def __init__(self, removed: Sequence[int]) -> None:
        self.removed = tuple(_whole("removed", count) for count in removed)

    def __repr__(self) -> str:
        return f"PerBlock({list(self.removed)})"

    def removals(self, depth: int) -> list[int]:
        """Patch tokens removed at each of `depth` blocks."""
        if len(self.removed) > depth:
            raise ValueError(f"{self!r} lists {len(self.removed)} blocks, the model has {depth}")
        return list(self.removed) + [0] * (depth - len(self.removed))

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        counts = []
        for removed in self.removals(depth):
            n_tokens = n_tokens - removed
            counts.append(n_tokens)
        return counts


class Constant(PerBlock):
    """t patch tokens removed at every block from `start` on."""

    def __init__(self, t: int, start: int = 0) -> None:
        self.t, self.start = _whole("t", t), _whole("start", start)

    def __repr__(self) -> str:
        return f"Constant({self.t}{f', start={self.start}' if self.start else ''})"

    def removals(self, depth: int) -> list[int]:
        _require_start(self, self.start, depth)
        return [self.t if block >= self.start else 0 for block in range(depth)]


class Linear(PerBlock):
    """floor(2t - 2tl / (L - 1)) patch tokens removed at block l of L: 2t at the first, none at the last.

    >>> Linear(16).removals(12)
    [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    """

    def __init__(self, t: int) -> None:
        self.t = _whole("t", t)

    def __repr__(self) -> str:
        return f"Linear({self.t})"

    def removals(self, depth: int) -> list[int]:
        last = depth - 1
        return [2 * self.t * (last - block) // last if last else self.t for block in range(depth)]


# What removes t tokens a block, by the names that commands and recipes use.
REMOVING: dict[str, type[Constant] | type[Linear]] = {"constant": Constant, "linear": Linear}


class Geometric(Schedule):
    """The same fraction stays at every block from `start` on: int(N r^m) after the m-th of them."""

    def __init__(self, keep_rate: float, start: int = 3) -> None:
        self.keep_rate, self.start = keep_rate, _whole("start", start)
        self._ratio = _ratio("keep_rate", keep_rate)

    def __repr__(self) -> str:
        return f"Geometric({self.keep_rate}, start={self.start})"

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        _require_start(self, self.start, depth)
        counts = []
        numerator, denominator = n_tokens, 1
        for block in range(depth):
            if block >= self.start:
                numerator, denominator = numerator * self._ratio[0], denominator * self._ratio[1]
            counts.append(numerator // denominator)
        return counts


def as_schedule(schedule: Schedule | Sequence[int]) -> Schedule:
    """A schedule as it is, or a list of tokens removed per block as a PerBlock."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, Sequence) and not isinstance(schedule, str):
        return PerBlock(schedule)
    raise ValueError(f"schedule={schedule!r} must be a Schedule or a list of tokens removed at each block")
