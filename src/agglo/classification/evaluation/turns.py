"""Speeds of one model under several reductions, measured in turns: what slows the machine down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import TypedDict

import torch
from torch import Tensor, nn

from agglo.experiments.variants import Variant
from agglo.patching import remove


class Speed(TypedDict):
    """images_per_second: the median over all passes. spread: between their quartiles; None if there was one pass."""

    images_per_second: float
    spread: float | None


def speeds_in_turns(
    model: nn.Module, variants: Sequence[Variant | None], batches: Sequence[Tensor], repeats: int
) -> list[Speed]:
    """How fast a model is as each of the variants, in their order; None is the dense model.

    batches: inputs (B, C, H, W) as the model takes them; they are moved to its device and dtype before any timing.
    repeats: rounds over all batches.

    Each variant runs a batch before any of them runs the next one, in the opposite order at every second batch, so that
    none always follows the same other. A variant's first pass, which compiles kernels and fills caches, is not counted.
    The model is dense afterwards.
    """
    if not variants or not batches or repeats < 1:
        given = f"{len(variants)} variants, {len(batches)} batches and repeats={repeats}"
        raise ValueError(f"{given}: at least one of each is needed")
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    speeds: list[list[float]] = [[] for _ in variants]
    numbers = list(range(len(variants)))
    try:
        inputs = [batch.to(like.device, like.dtype) for batch in batches]
        for variant in variants:
            _seconds(model, variant, inputs[0])
        for turn, batch in enumerate(inputs * repeats):
            for number in numbers if turn % 2 == 0 else reversed(numbers):
                speeds[number].append(len(batch) / _seconds(model, variants[number], batch))
    finally:
        remove(model)
        model.train(was_training)
    return [{"images_per_second": median(of_one), "spread": _spread(of_one)} for of_one in speeds]


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return upper - lower


def _seconds(model: nn.Module, variant: Variant | None, inputs: Tensor) -> float:
    if variant is None:
        remove(model)
    else:
        variant.apply(model)
    return timed_pass(model, inputs)[0]


@torch.inference_mode()
def timed_pass(model: nn.Module, inputs: Tensor) -> tuple[float, Tensor]:
    """Seconds of one pass, work that a device had in its queue not included, and what the model answered."""
    _synchronise(inputs.device)
    start = time.perf_counter()
    answers = model(inputs)
    _synchronise(inputs.device)
    return time.perf_counter() - start, answers


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
