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
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from agglo.patch import remove

T = TypeVar("T")
R = TypeVar("R")
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


def in_turns(contenders: Sequence[T], run: Callable[[T, int], R], repeats: int, *, warm_up: int = 1) -> list[list[R]]:
    """Return what `run` measures of each contender, one value per repeat.

    Every second turn is in the opposite order, so that none always follows the same other.

    Args:
        run: Measures a contender. It also gets the number of the turn, below 0 for a warm-up.
        warm_up: Turns before the `repeats` that count.

    >>> order = []
    >>> in_turns("ab", lambda name, turn: order.append((turn, name)), 2)
    [[None, None], [None, None]]
    >>> order
    [(-1, 'a'), (-1, 'b'), (0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    found: list[list[R]] = [[] for _ in contenders]
    order = list(enumerate(contenders))
    for turn in range(-warm_up, repeats):
        for number, contender in reversed(order) if turn > 0 and turn % 2 else order:
            measured = run(contender, turn)
            if turn >= 0:
                found[number].append(measured)
    return found


def speeds_in_turns(
    model: nn.Module,
    ways: Sequence[T],
    batches: Sequence[Tensor | list[Tensor]],
    repeats: int,
    apply: Callable[[T], None],
) -> list[dict[str, Any]]:
    """Return how fast a model is, in eval mode, in each of several ways. The model is dense afterwards.

    "images_per_second" is the median over all passes, "spread" between their quartiles, None if there was one pass.

    Args:
        ways: What `apply` takes, which makes the model run in a way.
        batches: Inputs as the model takes them, (B, C, H, W) or a list of images. All ways run a batch, in turns,
            before any of them runs the next one.
        repeats: Passes over each batch.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()

    def speed(batch: Any, way: T, turn: int) -> float:
        apply(way)
        return len(batch) / timed_pass(model, batch)[0]

    speeds: list[list[float]] = [[] for _ in ways]
    try:
        for batch in tree_map(lambda image: image.to(like.device, like.dtype), list(batches)):
            for found, measured in zip(speeds, in_turns(ways, partial(speed, batch), repeats), strict=True):
                found += measured
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
