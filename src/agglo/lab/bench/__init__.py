"""Benchmarks: one module each, with its `Options`, `run(options)` and `describe(record)`.

All contenders take turns within every repeat, there and back, so that a slow machine slows all of them; ratios are
medians of the ratios within a repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agglo.lab.options import AtLeastOne, option, require_limits
from agglo.utils import timing
from agglo.utils.files import require_output, write_json
from agglo.utils.machine import load_warning, processor
from agglo.utils.progress import progress
from agglo.utils.tables import Table
from agglo.utils.timing import CPU, stopwatch

C = TypeVar("C")
R = TypeVar("R")


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


def in_turns(
    name: str, contenders: Sequence[C], run: Callable[[C, int], R], repeats: int, *, warm_up: int = 1
) -> list[list[R]]:
    """Return what `timing.in_turns` does, with a progress bar of that name."""
    with progress(len(contenders) * (repeats + warm_up), f"bench {name}") as advance:

        def counted(contender: C, repeat: int) -> R:
            measured = run(contender, repeat)
            advance(f"repeat {repeat + 1}")
            return measured

        return timing.in_turns(contenders, counted, repeats, warm_up=warm_up)


def smooth_images(
    batch: int, channels: int, height: int, width: int, *, every: int = 64, noise: float = 0.1, seed: int = 0
) -> Tensor:
    """Return images (B, C, H, W) of random values on every so many pixels, bicubic in between, plus white noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, channels, max(2, height // every), max(2, width // every), generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic")
    return smooth + noise * torch.randn(smooth.shape, generator=generator)


class PartClock(dict[str, float]):
    """Seconds spent in each part of a pass."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.device = device

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the same callable, whose time is counted to a part."""

        def run(*inputs: Any, **options: Any) -> Any:
            with stopwatch(self.device) as taken:
                found = call(*inputs, **options)
            self[part] = self.get(part, 0.0) + taken.seconds
            return found

        return run


def conclude(record: Mapping[str, Any], text: str, path: Path | None) -> None:
    """Write a record, and print what it says."""
    if path is not None:
        write_json(path, record)
    print(text)


def page(record: Mapping[str, Any], what: str, table: Table, *notes: str) -> str:
    """Return a record as Markdown: what ran, where and when, its table, and notes."""
    busy = load_warning(record["machine"])
    listed = [f"- {note}" for note in (*notes, *([busy] if busy else []))]
    return "\n".join([f"{what}; {where(record)}.\n", table.markdown(), *([""] if listed else []), *listed])


def where(record: Mapping[str, Any]) -> str:
    """Return the processor of a record, its threads and its date."""
    found = record["machine"]
    return f"{processor(found)}, {found['threads']} thread{'s' * (found['threads'] != 1)}, {found['date'][:10]}"


def noise(dense: Sequence[float], again: Sequence[float]) -> float:
    """Return the furthest that the dense model was off its own speed in any repeat, as a fraction."""
    return max(abs(two / one - 1) for one, two in zip(dense, again, strict=True))


def noise_line(value: float) -> str:
    return f"noise: timed twice in this run, the dense model was up to {value:.1%} off itself"
