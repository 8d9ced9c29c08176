"""The optimiser and its rates: AdamW; a cosine by step as timm has it, or drops at certain epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from agglo.experiments.training.loop_settings import CosineSettings, DropSettings, LoopSettings


class Rates(Protocol):
    """Sets the rates of an optimiser's groups."""

    def step_update(self, num_updates: int) -> Any:
        """To what they are at a step, the first one being 0."""


# Of settings, an optimiser whose groups have their highest rates, and the number of steps per epoch.
RatesOf = Callable[[Any, torch.optim.Optimizer, int], Rates]


def cosine(settings: CosineSettings, optimiser: torch.optim.Optimizer, steps_per_epoch: int) -> Rates:
    """A cosine from the highest rate down, with a linear warm-up."""
    from timm.scheduler import CosineLRScheduler

    rate = optimiser.defaults["lr"]
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    steps = settings.epochs * steps_per_epoch
    scheduler: Rates = CosineLRScheduler(
        optimiser,
        t_initial=max(1, steps - warmup) if settings.cosine_after_warmup else steps,
        # Rates scale with the batch, these two do not: a small batch must not make them the larger ones.
        lr_min=min(settings.min_lr, rate),
        warmup_t=warmup,
        warmup_lr_init=min(settings.warmup_lr, rate),
        warmup_prefix=settings.cosine_after_warmup,
        t_in_epochs=False,
    )
    return scheduler


def drops(settings: DropSettings, optimiser: torch.optim.Optimizer, steps_per_epoch: int) -> Rates:
    """The highest rate, multiplied by lr_drop once each of lr_drops epochs is over, after a linear warm-up from
    warmup_factor of it over the first warmup_steps steps."""
    return _Drops(settings, optimiser, steps_per_epoch)


class _Drops:
    def __init__(self, settings: DropSettings, optimiser: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self.settings, self.optimiser = settings, optimiser
        self.at = sorted(round(epochs * steps_per_epoch) for epochs in settings.lr_drops)

    def step_update(self, num_updates: int) -> None:
        factor = self.settings.lr_drop ** bisect_right(self.at, num_updates)
        if num_updates < self.settings.warmup_steps:
            share = num_updates / self.settings.warmup_steps
            factor *= self.settings.warmup_factor + (1 - self.settings.warmup_factor) * share
        for group in self.optimiser.param_groups:
            group["lr"] = self.optimiser.defaults["lr"] * group.get("lr_scale", 1.0) * factor


def optimiser_and_rates(
    settings: LoopSettings,
    groups: Sequence[Mapping[str, Any]],
    total_batch: int,
    steps_per_epoch: int,
    rates: RatesOf = cosine,
) -> tuple[torch.optim.AdamW, Rates]:
    """AdamW over parameter groups, and what sets their rates at each step.

    groups: as AdamW takes them, with `lr_scale` where a group's rate is to be multiplied; `names` are left out.
    total_batch: images of one step, of all processes.
    """
    rate = settings.lr * total_batch / settings.lr_batch
    optimiser = torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups], lr=rate)
    return optimiser, rates(settings, optimiser, steps_per_epoch)
