"""What a person asks for: a speed, an accuracy, or GFLOPs."""

from __future__ import annotations

from dataclasses import dataclass

_START = 1.7  # times as fast as dense: where the search for an accuracy looks first


@dataclass(frozen=True)
class Target:
    """kind: "speedup" (times as fast as dense), "max_drop" (points of accuracy), "gflops" (fraction of dense)."""

    kind: str
    value: float

    @classmethod
    def of(cls, *, speedup: float | None, max_drop: float | None, gflops: float | None) -> Target:
        choices = {"speedup": speedup, "max_drop": max_drop, "gflops": gflops}
        given = [name for name, value in choices.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give one of speedup, max_drop and gflops, not {' and '.join(given) or 'none'}")
        kind = given[0]
        value = choices[kind]
        accepted = {
            "speedup": ("above 1: times as fast as the dense model", lambda v: v > 1),
            "max_drop": ("above 0 and below 100: points of accuracy", lambda v: 0 < v < 100),
            "gflops": ("between 0 and 1: the fraction of the dense model's that is left", lambda v: 0 < v < 1),
        }
        words, holds = accepted[kind]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
            raise ValueError(f"{kind}={value!r} must lie {words}")
        return cls(kind, float(value))

    @property
    def by_time(self) -> bool:
        """Whether candidates are compared at equal time; otherwise at equal GFLOPs."""
        return self.kind != "gflops"

    @property
    def level(self) -> float:
        """What candidates may cost where they are compared: time or GFLOPs relative to dense."""
        if self.kind == "gflops":
            return self.value
        return 1 / (self.value if self.kind == "speedup" else _START)

    @property
    def levels(self) -> list[float]:
        """Costs at which the front is drawn, falling; that of the target is among them, unless only an accuracy is."""
        if self.kind == "gflops":
            around = [0.85, 0.7, 0.6, 0.5, 0.4, 0.3]
        else:
            around = [1 / speed for speed in (1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.7)]
        apart = [cost for cost in around if self.kind == "max_drop" or abs(cost / self.level - 1) > 0.04]
        return sorted({*apart, *([] if self.kind == "max_drop" else [self.level])}, reverse=True)

    def __str__(self) -> str:
        return {
            "speedup": f"{self.value:g} times as fast as dense",
            "max_drop": f"at most {self.value:g} points of accuracy lost",
            "gflops": f"{self.value:g} of the dense model's GFLOPs",
        }[self.kind]
