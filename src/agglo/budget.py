"""The recipe behind `flops=`: options of a method, and schedules with one free number that is solved for the budget.

The options are those that kept several pretrained models nearest to what they answer without reduction, each judged by
models that had no part in the choice (docs/choosing.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from agglo.config import ReductionConfig
from agglo.schedule import Stages

# Of methods that are not listed, the recipe is the schedule alone.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "atc": {"linkage": "complete", "features": "tokens", "mean": "preserve_norm"}
}
_DIGITS = 4  # of a keep rate
_BEFORE_START = 0.25  # of the dense FLOPs, what is left for reduced blocks where the schedule begins earlier
_BISECTIONS = 12
_NEAR = 0.002  # of the dense model's multiply-adds: near enough below what is asked for


def recipe_options(method: str, reads_class_token: bool) -> dict[str, Any]:
    """Return the recipe's arguments of `ReductionConfig.of` besides the schedule.

    Args:
        method: The name of a method.
        reads_class_token: Whether the model's head reads the class token alone.
    """
    options = dict(_OPTIONS.get(method, {}))
    if method == "atc":
        options["importance"] = "class" if reads_class_token else "received"
    return {**options, "last_block": "class_token"} if reads_class_token else options


def recipe_schedule(depth: int, flops: float, amount: float) -> Stages:
    """Return the recipe's schedule for a depth and a budget, which leaves a fraction of the tokens in the end.

    The same fraction stays at every block from a quarter to three quarters of the depth. Below half of the FLOPs it
    begins earlier: what the first blocks take would leave too little for the others.

    >>> recipe_schedule(4, 0.5, 0.125).counts(196, 4), recipe_schedule(12, 0.35, 0.125).blocks
    ([196, 98, 49, 24], (1, 2, 3, 4, 5, 6, 7, 8, 9))
    """
    start = max(0, min(depth // 4, int(depth * (flops - _BEFORE_START))))
    return schedule_of("geometric", start, min(depth - 1, 3 * depth // 4), 1, amount)


def schedule_of(curve: str, start: int, last: int, stride: int, amount: float) -> Stages:
    """Return a schedule for any number of tokens.

    Args:
        curve: "geometric" keeps the same fraction at every reduction, "constant" removes the same number, "linear"
            removes most at the first and ever fewer, as the schedule of that name.
        start: The first block that reduces; of those up to `last`, every `stride`-th does.
        last: The last block that may.
        stride: Blocks from one reduction to the next.
        amount: Fraction of the tokens that is left in the end, in (0, 1].

    >>> schedule_of("geometric", 3, 9, 3, 0.125), schedule_of("constant", 0, 1, 1, 0.5)
    (Stages((0.5, 0.5, 0.5), blocks=(3, 6, 9)), Stages((0.75, 0.6667), blocks=(0, 1)))
    """
    blocks = tuple(range(start, last + 1, stride))
    if not blocks:
        raise ValueError(f"a schedule from block {start} to block {last} has no block")
    removed = [nth / len(blocks) for nth in range(len(blocks) + 1)]  # of what is removed in the end
    if curve == "geometric":
        left = [amount**part for part in removed]
    elif curve == "constant":
        left = [1 - (1 - amount) * part for part in removed]
    else:
        left = [1 - (1 - amount) * (1 - (1 - part) ** 2) for part in removed]
    return Stages(tuple(round(after / before, _DIGITS) for before, after in pairwise(left)), blocks)


def solve(
    config_of: Callable[[float], ReductionConfig], cost_of: Callable[[ReductionConfig], float], flops: float
) -> ReductionConfig:
    """Return the config that leaves as many tokens as fit into a share of the dense model's multiply-adds.

    Args:
        config_of: Makes a config that leaves a fraction of the tokens in the end.
        cost_of: Returns the share that a config costs.
        flops: The share that is allowed.

    Raises:
        ValueError: There is none; the message says why.
    """
    found: ReductionConfig | None = None
    reason = f"{flops:.2f} of the dense model's FLOPs are too few"
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        amount = (low + high) / 2
        try:
            config = config_of(amount)
            cost = cost_of(config)
        except ValueError as error:  # out of the method's reach: more must stay
            low, reason = amount, str(error)
            continue
        if cost > flops:
            high = amount
            continue
        low, found = amount, config
        if flops - cost < _NEAR:
            break
    if found is None:
        raise ValueError(reason)
    return found
