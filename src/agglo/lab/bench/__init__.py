"""Benchmarks: one module each, with its `Options` and `run(options)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agglo.lab.options import AtLeastOne, option, require_limits
from agglo.utils.files import require_output, write_json
from agglo.utils.machine import load_warning


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """The options that benchmarks share."""

    repeats: AtLeastOne = option(7, "turns of all contenders")
    threads: AtLeastOne | None = option(None, "CPU threads of torch (default: torch's)")
    json: Path | None = option(None, "every timing, the machine and the settings")

    def __post_init__(self) -> None:
        require_limits(self)
        if self.json is not None:
            require_output(self.json)

    def settings(self) -> dict[str, Any]:
        """Return the options as a record holds them."""
        return {name: value for name, value in asdict(self).items() if name != "json"}


def conclude(record: Mapping[str, Any], text: str, path: Path | None) -> None:
    """Write a record, and print what it says."""
    if path is not None:
        write_json(path, record)
    print(text)
    if (busy := load_warning(record["machine"])) is not None:
        print(busy)


def where(record: Mapping[str, Any]) -> str:
    """Return the GPU of a record, or its CPU and the number of threads."""
    found = record["machine"]
    return str(found["gpu"] or f"{found['cpu']}, {found['threads']} thread{'s' * (found['threads'] != 1)}")


def noise(dense: Sequence[float], again: Sequence[float]) -> float:
    """Return the furthest that the dense model was off its own speed in any repeat, as a fraction."""
    return max(abs(two / one - 1) for one, two in zip(dense, again, strict=True))


def noise_line(value: float) -> str:
    return f"noise: timed twice in this run, the dense model was up to {value:.1%} off itself"
