"""How many patch tokens are left after each block. Prefix tokens are never counted.

All arithmetic is on integers: a rate is a ratio of two, so that 0.7 of 100 tokens twice is 49, not the 48 that floating
point makes of it, and torch.compile can follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar

from agglo.checks import choice, flag, number, whole_numbers
from agglo.text import format_call, parse_call

Rates = float | Sequence[float]
Ratio = tuple[int, int]
_set = object.__setattr__  # what a frozen dataclass may do to itself while it is being made


class Schedule(ABC):
    """Counts of patch tokens for any number of tokens and any depth; the base class of all kinds.

    A schedule is a value, a frozen dataclass: `repr` is the Python that makes it, and `str` is the text that commands
    and records take.

    returning: whether counts may rise again, for methods whose tokens return.

    >>> from agglo import Stages
    >>> str(Stages(0.5, blocks=(3, 6))), Stages(0.5).counts(196, 12)
    ('stages:0.5,blocks=[3,6]', [196, 196, 196, 98, 98, 98, 49, 49, 49, 24, 24, 24])
    """

    example: ClassVar[str]  # a text of this kind, which begins with its name
    returning: bool = False

    @abstractmethod
    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        """Return the patch tokens left after each block, unchecked."""

    def counts(self, n_tokens: int, depth: int, *, strict: bool = True) -> list[int]:
        """Return the patch tokens left after each of `depth` blocks, starting from n_tokens.

        Args:
            strict: False takes the nearest possible count where the schedule asks for none or for more than there are.
                Forward passes do so, for no image and no window is too small for a model that runs.

        Raises:
            ValueError: If strict, such a count is asked for.
        """
        counts: list[int] = []
        for block, count in enumerate(self._wanted(n_tokens, depth)):
            most = n_tokens if self.returning or not counts else counts[-1]
            if strict and not 1 <= count <= most:
                limit = "at least 1 must stay" if count < 1 else f"only {most} are left there"
                raise ValueError(f"{self!r} asks for {count} of {n_tokens} patch tokens after block {block}; {limit}")
            counts.append(min(max(count, 1), most))
        return counts

    def starts(self, n_tokens: int, depth: int) -> list[int]:
        """Return the blocks at which a stage begins: where the count changes, unless there are stages."""
        counts = [n_tokens, *self.counts(n_tokens, depth, strict=False)]
        return [block for block in range(depth) if counts[block + 1] != counts[block]]

    def __repr__(self) -> str:
        first, others = self._given()
        return f"{type(self).__name__}({', '.join([repr(first), *(f'{k}={v!r}' for k, v in others.items())])})"

    def __str__(self) -> str:
        first, others = self._given()
        values = first if isinstance(first, tuple) and len(first) > 1 else (first,)
        return format_call(self.example.partition(":")[0], values, others)

    def _given(self) -> tuple[Any, dict[str, Any]]:
        """Return the value of the first field, and the others that differ from their defaults."""
        first, *others = (each for each in fields(self) if each.init)  # type: ignore[arg-type]  # a dataclass
        given = {each.name: getattr(self, each.name) for each in others if getattr(self, each.name) != each.default}
        return getattr(self, first.name), given


class _AtStages(Schedule):
    """Reduce at a few blocks, each the start of a stage."""

    blocks: Sequence[int] | None

    @abstractmethod
    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        """Return the patch tokens left after each stage."""

    def starts(self, n_tokens: int, depth: int) -> list[int]:
        return list(default_blocks(depth, 3 if self.returning else 4) if self.blocks is None else self.blocks)

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        blocks = self.starts(n_tokens, depth)
        if blocks[-1] >= depth:
            raise ValueError(f"blocks={blocks} do not fit a model of depth {depth}: 0 to {depth - 1} exist")
        after_stage = [n_tokens, *self._after_stages(n_tokens, len(blocks))]
        if len(after_stage) != 1 + len(blocks):
            raise ValueError(f"{self!r} needs {len(blocks)} values, one per stage")
        return [after_stage[sum(start <= block for start in blocks)] for block in range(depth)]

    def _check(self, n_stages: int | None) -> None:
        """Check blocks and returning, given for how many stages there are numbers; None is for any number of them."""
        flag("returning", self.returning)
        if self.blocks is None:
            return
        blocks = whole_numbers("blocks", self.blocks)
        if any(a >= b for a, b in pairwise(blocks)):
            raise ValueError(f"blocks={blocks} must increase")
        if n_stages not in (None, len(blocks)):
            raise ValueError(f"{n_stages} stages do not fit blocks={blocks}: give one value per block")
        _set(self, "blocks", blocks)


@dataclass(frozen=True, repr=False)
class Stages(_AtStages):
    """Reduce at a few blocks, as the paper does.

    keep_rate: the fraction that stays at each stage: one for all, or one per stage.
    blocks: 0-based; None means a quarter, a half and three quarters of the depth (3, 6, 9 of 12).
    nested: False takes int(N r1 r2 ...) of the initial count N; True takes int(r n) of the current count n, so that
        roundings add up, as the paper's detectors do.
    returning: every stage takes int(N r) of all tokens, by default at a third and two thirds of the depth (4, 8 of 12),
        for methods whose tokens return after a stage.

    >>> Stages((0.9, 0.7), blocks=(2, 4)).counts(100, 6)
    [100, 100, 90, 90, 63, 63]
    """

    example: ClassVar[str] = "stages:0.5"
    keep_rate: Rates
    blocks: Sequence[int] | None = None
    nested: bool = field(default=False, kw_only=True)
    returning: bool = field(default=False, kw_only=True)
    _ratios: tuple[Ratio, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        is_one = isinstance(self.keep_rate, str) or not isinstance(self.keep_rate, Iterable)
        rates: Any = (self.keep_rate,) if is_one else tuple(self.keep_rate)  # type: ignore[arg-type]
        if not rates:
            raise ValueError(f"keep_rate={self.keep_rate!r} must be a keep rate, or one per stage")
        _set(self, "_ratios", tuple(map(_as_ratio, rates)))
        _set(self, "keep_rate", float(rates[0]) if is_one else tuple(map(float, rates)))
        self._check(None if is_one else len(rates))
        if flag("nested", self.nested) and self.returning:
            raise ValueError("nested takes rates of the current count and returning of all tokens: give one of them")

    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        ratios = self._ratios * n_stages if isinstance(self.keep_rate, float) else self._ratios
        if self.returning:
            return [n_tokens * top // bottom for top, bottom in ratios]
        return _products(n_tokens, ratios, self.nested)


@dataclass(frozen=True, repr=False)
class Counts(_AtStages):
    """A number of patch tokens left after each stage, whatever their number before: for one image size.

    left: after each stage.
    blocks: as for `Stages`. With all blocks listed, the counts are those after each block.

    >>> Counts((90, 30, 10)).counts(196, 12)
    [196, 196, 196, 90, 90, 90, 30, 30, 30, 10, 10, 10]
    """

    example: ClassVar[str] = "counts:90,30,10,blocks=[3,6,9]"
    left: Sequence[int]
    blocks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _set(self, "left", whole_numbers("left", self.left, minimum=1))
        self._check(len(self.left))

    def _after_stages(self, n_tokens: int, n_stages: int) -> list[int]:
        return list(self.left)


class _Removing(Schedule):
    """Remove a number of patch tokens at every block."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # a dataclass
            number(each.name, getattr(self, each.name), whole=True, minimum=0)

    @abstractmethod
    def removals(self, depth: int) -> list[int]:
        """Return the patch tokens removed at each of `depth` blocks."""

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        removed = self.removals(depth)
        return [n_tokens - sum(removed[: block + 1]) for block in range(depth)]


@dataclass(frozen=True, repr=False)
class PerBlock(_Removing):
    """Any list of patch tokens removed at each block; blocks beyond a short list remove none.

    >>> PerBlock((0, 30, 0, 20)).counts(100, 6)
    [100, 70, 70, 50, 50, 50]
    """

    example: ClassVar[str] = "per_block:0,0,0,49,0,0,49"
    removed: Sequence[int]

    def __post_init__(self) -> None:
        _set(self, "removed", whole_numbers("removed", self.removed))

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

    example: ClassVar[str] = "constant:14,start=3"
    t: int
    start: int = 0

    def removals(self, depth: int) -> list[int]:
        return [0] * self.start + [self.t] * _blocks_from(self.start, depth)


@dataclass(frozen=True, repr=False)
class Linear(_Removing):
    """floor(2t - 2tl / (L - 1)) patch tokens removed at block l of L: 2t at the first, none at the last.

    >>> Linear(16).removals(12)
    [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    """

    example: ClassVar[str] = "linear:16"
    t: int

    def removals(self, depth: int) -> list[int]:
        last = depth - 1
        return [2 * self.t * (last - block) // last if last else self.t for block in range(depth)]


@dataclass(frozen=True, repr=False)
class Geometric(Schedule):
    """The same fraction stays at every block from `start` on: int(N r^m) after the m-th of them.

    >>> Geometric(0.5, start=1).counts(100, 4)
    [100, 50, 25, 12]
    """

    example: ClassVar[str] = "geometric:0.8"
    keep_rate: float
    start: int = 3
    _ratio: Ratio = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, "_ratio", _as_ratio(self.keep_rate))
        _set(self, "keep_rate", float(self.keep_rate))
        number("start", self.start, whole=True, minimum=0)

    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        ratios = [self._ratio] * _blocks_from(self.start, depth)
        return [n_tokens] * self.start + _products(n_tokens, ratios)


def _products(n_tokens: int, ratios: Iterable[Ratio], nested: bool = False) -> list[int]:
    """Return int(N r1), int(N r1 r2), ... exactly; nested rounds before every further rate."""
    counts, numerator, denominator = [], n_tokens, 1
    for top, bottom in ratios:
        numerator, denominator = numerator * top, denominator * bottom
        counts.append(numerator // denominator)
        if nested:
            numerator, denominator = counts[-1], 1
    return counts


def _blocks_from(start: int, depth: int) -> int:
    """Return how many blocks there are from `start` on."""
    if start >= depth:
        raise ValueError(f"start={start} is block {start} of a model of depth {depth}: nothing would be reduced")
    return depth - start


_KINDS: dict[str, type[Any]] = {
    kind.example.partition(":")[0]: kind for kind in (Stages, Counts, Constant, Linear, Geometric, PerBlock)
}
EXAMPLES = ", ".join(kind.example for kind in _KINDS.values())


def as_schedule(schedule: Schedule | str | Sequence[int]) -> Schedule:
    """Return a schedule as it is, from its text, or from a list of tokens removed at each block.

    The text is `kind:values,option=value`, with the arguments of the kind's class.

    Raises:
        ValueError: There is no such kind of schedule, or it does not take these values.

    >>> as_schedule("stages:0.5,blocks=[3,6,9]"), as_schedule([0, 30])
    (Stages(0.5, blocks=(3, 6, 9)), PerBlock((0, 30)))
    """
    if isinstance(schedule, Schedule):
        return schedule
    try:
        if not isinstance(schedule, str):
            return PerBlock(schedule)
        name, values, options = parse_call(schedule)
        kind = _KINDS[choice("kind", name, _KINDS)]
        first, *others = (each.name for each in fields(kind) if each.init)
        for option in options:
            choice("option", option, others)
        if not values:
            raise ValueError(f"{name} needs {first}")
        takes_list = first in ("left", "removed") and not isinstance(values[0], list)
        made: Schedule = kind(values if takes_list or len(values) > 1 else values[0], **options)
        return made
    except ValueError as error:
        accepted = f"accepted are such as {EXAMPLES}, or a list of tokens removed at each block"
        raise ValueError(f"schedule={schedule!r}: {error}; {accepted}") from None


def _as_ratio(rate: float) -> Ratio:
    """Return a keep rate as numerator and denominator: 0.7 is 7/10 and 1/3 is 1/3, whatever their binary expansion."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        percent = isinstance(rate, (int, float)) and 1 < rate <= 100
        hint = f"; did you mean {rate / 100:g}?" if percent else ""
        raise ValueError(
            f"keep_rate={rate!r} is not a keep rate: the fraction of tokens that stays, above 0 and up to 1{hint}"
        )
    return Fraction(rate).limit_denominator(10**9).as_integer_ratio()


def default_blocks(depth: int, parts: int = 4) -> tuple[int, ...]:
    """Return the paper's blocks 3, 6 and 9 of 12, at the same fractions of any depth; 4 and 8 with three parts.

    >>> default_blocks(12), default_blocks(24), default_blocks(12, 3)
    ((3, 6, 9), (6, 12, 18), (4, 8))
    """
    return tuple(sorted({depth * part // parts for part in range(1, parts)}))
