"""One way to time: calls on any device, and contenders in turns, so that what slows the machine slows all alike.

How busy the machine was is in what `machine.machine` returns, which every benchmark writes into its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from agglo.patch import remove

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass
class Elapsed:
    seconds: float = 0.0  # until the block of `stopwatch` ends


@contextmanager
def stopwatch(device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter) -> Iterator[Elapsed]:
    """Time a block; work that the device had in its queue before is not included.

    >>> with stopwatch() as taken:
    ...     work = sum(range(1000))
    >>> 0 < taken.seconds < 1
    True
    """
    elapsed = Elapsed()
    _synchronise(device)
    start = clock()
    yield elapsed
    _synchronise(device)
    elapsed.seconds = clock() - start


@torch.inference_mode()
def timed_pass(model: Callable[[Any], Any], inputs: Tensor | list[Tensor]) -> tuple[float, Any]:
    """Return the seconds of one forward pass, and the model's output."""
    with stopwatch(inputs[0].device) as taken:
        output = model(inputs)
    return taken.seconds, output


@torch.inference_mode()
def seconds_per_pass(run: Callable[[], Any], device: torch.device = CPU, passes: int = 1) -> float:
    """Return the mean seconds of a call, over several without synchronising in between."""
    with stopwatch(device) as taken:
        for _ in range(passes):
            run()
    return taken.seconds / passes


def turns(contenders: Sequence[T], repeats: int, *, warm_up: int = 1) -> Iterator[tuple[int, list[T]]]:
    """Yield the number of each turn, below 0 for a warm-up, and the contenders in the order in which they run.

    Every second turn is in the opposite order, so that none always follows the same other.

    >>> list(turns("ab", 2))
    [(-1, ['a', 'b']), (0, ['a', 'b']), (1, ['b', 'a'])]
    """
    for turn in range(-warm_up, repeats):
        yield turn, list(reversed(contenders)) if turn > 0 and turn % 2 else list(contenders)


def seconds_in_turns(runs: Sequence[Callable[[], float]], repeats: int, *, warm_up: int = 1) -> list[list[float]]:
    """Return the seconds that each function says it took, one value per repeat."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn, order in turns(range(len(runs)), repeats, warm_up=warm_up):
        for number in order:
            seconds = runs[number]()
            if turn >= 0:
                taken[number].append(seconds)
    return taken


class Speed(TypedDict):
    """images_per_second: the median over all passes. spread: between their quartiles; None if there was one pass."""

    images_per_second: float
    spread: float | None


def speeds_in_turns(
    model: nn.Module,
    ways: Sequence[T],
    batches: Sequence[Tensor | list[Tensor]],
    repeats: int,
    apply: Callable[[T], None],
) -> list[Speed]:
    """Return how fast a model is, in eval mode, in each of several ways. The model is dense afterwards.

    Args:
        model: The model.
        ways: What `apply` takes, which makes the model run in a way.
        batches: Inputs as the model takes them, (B, C, H, W) or a list of images. All ways run a batch, in turns,
            before any of them runs the next one.
        repeats: Passes over each batch.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()

    def seconds(way: T, batch: Any) -> float:
        apply(way)
        return timed_pass(model, batch)[0]

    speeds: list[list[float]] = [[] for _ in ways]
    try:
        for batch in tree_map(lambda image: image.to(like.device, like.dtype), list(batches)):
            runs = [partial(seconds, way, batch) for way in ways]
            for found, taken in zip(speeds, seconds_in_turns(runs, repeats), strict=True):
                found += [len(batch) / each for each in taken]
    finally:
        remove(model)
        model.train(was_training)
    parts = [(*quartiles(values), len(values)) for values in speeds]
    return [{"images_per_second": mid, "spread": high - low if n > 1 else None} for low, mid, high, n in parts]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; a single value is all three."""
    lower, middle, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return lower, middle, upper


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within each turn, which what slows a whole turn does not change."""
    return median(one / other for one, other in zip(values, others, strict=True))


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
