"""Speeds of one model under several reductions, measured in turns: what slows the machine down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from agglo.experiments.variants import Variant
from agglo.patching import remove

B = TypeVar("B")


class Speed(TypedDict):
    """images_per_second: the median over all passes. spread: between their quartiles; None if there was one pass."""

    images_per_second: float
    spread: float | None


def speeds_in_turns(
    model: nn.Module,
    variants: Sequence[Variant | None],
    batches: Sequence[Tensor | list[Tensor]],
    repeats: int,
    *,
    apply: Callable[[Variant | None], None] | None = None,
) -> list[Speed]:
    """How fast a model is as each of the variants, in their order; None is the dense model.

    batches: inputs as the model takes them, (B, C, H, W) or a list of images; they are moved to its device and dtype
        before any timing.
    repeats: rounds over all batches.
    apply: makes the model a variant, where `Variant.apply` is not all of it.

    Who runs when is said at `seconds_in_turns`. The model is dense afterwards.
    """
    if not variants or not batches or repeats < 1:
        given = f"{len(variants)} variants, {len(batches)} batches and repeats={repeats}"
        raise ValueError(f"{given}: at least one of each is needed")
    like = next(model.parameters())
    was_training = model.training
    model.eval()

    def seconds(variant: Variant | None, inputs: Any) -> float:
        if apply is not None:
            apply(variant)
        elif variant is None:
            remove(model)
        else:
            variant.apply(model)
        return timed_pass(model, inputs)[0]

    try:
        inputs = [_like(batch, like) for batch in batches]
        taken = seconds_in_turns([partial(seconds, variant) for variant in variants], inputs, repeats)
    finally:
        remove(model)
        model.train(was_training)
    sizes = [len(batch) for batch in inputs] * repeats
    speeds = [[size / spent for size, spent in zip(sizes, of_one, strict=True)] for of_one in taken]
    return [{"images_per_second": median(of_one), "spread": _spread(of_one)} for of_one in speeds]


def seconds_in_turns(
    contenders: Sequence[Callable[[B], float]], batches: Sequence[B], repeats: int
) -> list[list[float]]:
    """Seconds that each contender says it took, for every batch of every repeat.

    Each contender gets a batch before any of them gets the next one, in the opposite order at every second batch, so
    that none always follows the same other. Its first pass, which compiles kernels and fills caches, is not counted.
    """
    for contender in contenders:
        contender(batches[0])
    taken: list[list[float]] = [[] for _ in contenders]
    numbers = list(range(len(contenders)))
    for turn, batch in enumerate([batch for _ in range(repeats) for batch in batches]):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            taken[number].append(contenders[number](batch))
    return taken


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return upper - lower


def _like(batch: Tensor | list[Tensor], other: Tensor) -> Any:
    """The batch on another tensor's device and in its dtype."""
    if isinstance(batch, Tensor):
        return batch.to(other.device, other.dtype)
    return [image.to(other.device, other.dtype) for image in batch]


@torch.inference_mode()
def timed_pass(model: Callable[[Any], Any], inputs: Tensor | list[Tensor]) -> tuple[float, Any]:
    """Seconds of one pass, work that a device had in its queue not included, and what the model answered."""
    device = inputs[0].device
    _synchronise(device)
    start = time.perf_counter()
    answers = model(inputs)
    _synchronise(device)
    return time.perf_counter() - start, answers


@torch.inference_mode()
def seconds_per_pass(run: Callable[[], Any], device: torch.device, passes: int = 1) -> float:
    """Seconds of one pass, over several without waiting in between, work that the device had in its queue not
    included."""
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(passes):
        run()
    _synchronise(device)
    return (time.perf_counter() - start) / passes


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
