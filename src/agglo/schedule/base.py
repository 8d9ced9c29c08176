"""What every schedule can do, and what the kinds of it are checked by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

Rates = float | Sequence[float]
Ratio = tuple[int, int]


class Schedule(ABC):
    """A plan for any number of tokens and any depth.

    returning: whether counts may rise again, for methods whose tokens return.

    >>> class Halfway(agglo.Schedule):
    ...     def _wanted(self, n_tokens, depth):
    ...         return [n_tokens] * (depth // 2) + [n_tokens // 2] * (depth - depth // 2)
    >>> Halfway().counts(196, 4)
    [196, 196, 98, 98]
    """

    returning: bool = False

    @abstractmethod
    def _wanted(self, n_tokens: int, depth: int) -> list[int]:
        """Patch tokens left after each block, unchecked."""

    def counts(self, n_tokens: int, depth: int) -> list[int]:
        """Patch tokens left after each of `depth` blocks, starting from n_tokens; ValueError if none would be left.

        >>> from agglo import Stages
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

    def as_dict(self) -> dict[str, Any]:
        """Its kind and numbers, for JSON and TOML; `schedule_from_dict` gives the schedule back."""
        raise ValueError(f"{self!r} is a schedule of its own kind, which files and commands cannot hold")


@dataclass(frozen=True)
class Form:
    """How a kind of schedule is written: `kind:values@at:flag`.

    values, at, flags: the fields that stand there; flags are the ones that are true or false.
    examples: of the whole text.
    """

    kind: str
    values: str
    at: str | None
    flags: tuple[str, ...]
    examples: tuple[str, ...]


class WrittenSchedule(Schedule):
    """A schedule that is a frozen dataclass of numbers, and can therefore be written down."""

    form: ClassVar[Form]

    def __repr__(self) -> str:
        first, *others = self._given().items()
        arguments = [repr(first[1]), *(f"{name}={value!r}" for name, value in others)]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __str__(self) -> str:
        given = self._given()
        text = f"{self.form.kind}:{_numbers(given.pop(self.form.values))}"
        if self.form.at in given:
            text += f"@{_numbers(given.pop(self.form.at), trailing='')}"
        return ":".join([text, *given])

    def as_dict(self) -> dict[str, Any]:
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self._given().items()}
        return {"kind": self.form.kind, **plain}

    def _given(self) -> dict[str, Any]:
        """Its fields, the first one always and the others where they differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)  # type: ignore[arg-type]  # every kind is a dataclass
            if field.init and (field.default is MISSING or getattr(self, field.name) != field.default)
        }


def _numbers(value: Any, trailing: str = ",") -> str:
    """A number, or several with commas. One rate for a single stage has a comma behind it, as in Python: without, it
    would be the rate of every stage."""
    if isinstance(value, tuple):
        return ",".join(map(_number, value)) + (trailing if len(value) == 1 and isinstance(value[0], float) else "")
    return _number(value)


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def as_ratio(name: str, rate: float) -> Ratio:
    """A keep rate as numerator and denominator: 0.7 is 7/10 and 1/3 is 1/3, whatever their binary expansion."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        percent = isinstance(rate, (int, float)) and 1 < rate <= 100
        hint = f"; did you mean {rate / 100:g}?" if percent else ""
        raise ValueError(
            f"{name}={rate!r} is not a keep rate: the fraction of tokens that stays, above 0 and up to 1{hint}"
        )
    return Fraction(rate).limit_denominator(10**9).as_integer_ratio()


def as_whole(name: str, value: int, least: int = 0) -> int:
    """The number itself, if it is a whole one and large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")
    return value


def as_wholes(name: str, values: Sequence[int], least: int = 0) -> tuple[int, ...]:
    """The numbers as a tuple, if there are any and all of them are whole and large enough."""
    if isinstance(values, (str, int, float)) or not values:
        raise ValueError(f"{name}={values!r} must be a list of whole numbers, at least one of them")
    return tuple(as_whole(name, value, least) for value in values)


def require_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def default_blocks(depth: int, parts: int = 4) -> tuple[int, ...]:
    """The paper's blocks 3, 6 and 9 of 12, at the same fractions of any depth; 4 and 8 if it is cut in three parts.

    >>> default_blocks(12), default_blocks(24), default_blocks(12, 3)
    ((3, 6, 9), (6, 12, 18), (4, 8))
    """
    return tuple(sorted({depth * part // parts for part in range(1, parts)}))
