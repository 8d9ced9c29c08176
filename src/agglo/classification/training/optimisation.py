"""The optimiser and its rates: AdamW, and timm's cosine schedule by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agglo.classification.training.parameter_groups import parameter_groups
from agglo.classification.training.settings import TrainingSettings


def optimiser_and_rates(
    settings: TrainingSettings, model: nn.Module, total_batch: int, steps_per_epoch: int
) -> tuple[torch.optim.AdamW, Any]:
    """AdamW over the model's parameter groups, and the scheduler whose step_update(step) sets their rates.

    total_batch: images of one step, of all processes.
    """
    from timm.scheduler import CosineLRScheduler

    groups = parameter_groups(
        model,
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        backbone_lr_scale=settings.backbone_lr_scale,
    )
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
