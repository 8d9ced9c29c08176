"""The optimiser and its rates: AdamW, and timm's cosine schedule by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class RateSettings(Protocol):
    """The settings that decide how fast a run learns; `classification.training.settings` says what each means."""

    @property
    def epochs(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def lr_batch(self) -> int: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_lr(self) -> float: ...
    @property
    def warmup_epochs(self) -> float: ...
    @property
    def cosine_after_warmup(self) -> bool: ...


def optimiser_and_rates(
    settings: RateSettings, groups: Sequence[Mapping[str, Any]], total_batch: int, steps_per_epoch: int
) -> tuple[torch.optim.AdamW, Any]:
    """AdamW over parameter groups, and the scheduler whose step_update(step) sets their rates.

    groups: as AdamW takes them, with `lr_scale` where a group's rate is to be multiplied; `names` are left out.
    total_batch: images of one step, of all processes.
    """
    from timm.scheduler import CosineLRScheduler

    rate = settings.lr * total_batch / settings.lr_batch
    optimiser = torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups], lr=rate)
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    steps = settings.epochs * steps_per_epoch
    scheduler = CosineLRScheduler(
        optimiser,
        t_initial=max(1, steps - warmup) if settings.cosine_after_warmup else steps,
        # Rates scale with the batch, these two do not: a small batch must not make them the larger ones.
        lr_min=min(settings.min_lr, rate),
        warmup_t=warmup,
        warmup_lr_init=min(settings.warmup_lr, rate),
        warmup_prefix=settings.cosine_after_warmup,
        t_in_epochs=False,
    )
    return optimiser, scheduler
