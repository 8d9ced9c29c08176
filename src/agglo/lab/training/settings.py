"""Settings of training that tasks build on: AdamW and its learning rate schedules, and how tokens are reduced."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from agglo.config import BUDGETS, ReductionConfig
from agglo.hosts.registry import applied_modules
from agglo.lab.options import FLOPS_HELP, Amount, AtLeastOne, Fraction, Whole, option
from agglo.patch import trace
from agglo.tracing import Trace


@dataclass(frozen=True)
class LoopSettings:
    """Settings of AdamW, the weight average, evaluation and checkpoints. Tasks change the defaults."""

    epochs: AtLeastOne = option(30, "passes over the training images")
    batch_size: AtLeastOne = option(64, "of one process and one accumulation step")
    accumulation: AtLeastOne = option(1, "batches whose gradients make one step")
    lr: Amount = option(
        1e-3,
        "highest, at a total batch (batch_size x accumulation x processes) of lr_batch; others in proportion",
    )
    lr_batch: AtLeastOne = option(64, "total batch that lr is for")
    weight_decay: Amount = option(0.05, "of AdamW")
    clip_grad: Amount = option(0.0, "largest gradient norm; 0 is no limit")
    ema_decay: Fraction = option(0.0, "of the average of the weights; 0 is none")
    ema_warmup: bool = option(False, "let the average forget faster at first")
    seed: Whole = option(0, "of all that is drawn")
    precision: Literal["no", "bf16", "fp16", "auto"] = option(
        "no", "mixed precision: no, bf16, fp16, or auto: fp16 on GPUs and none on CPUs"
    )
    evaluate_first: bool = option(
        False, "before training too: a row of the log, never the best one", action=BooleanOptionalAction
    )
    evaluate_every: AtLeastOne = option(1, "epochs from one evaluation to the next; after the last one always")
    checkpoint_minutes: Amount = option(10.0, "longest time between checkpoints")
    tracker: str = option("none", "besides log.csv: tensorboard, wandb, or any other that Accelerate knows")

    def lr_schedule(self, optimiser: Optimizer, steps_per_epoch: int) -> Any:
        """Return one of timm's schedulers, for an optimiser whose groups have their highest learning rates."""
        raise NotImplementedError


@dataclass(frozen=True)
class CosineSettings(LoopSettings):
    """Settings of a cosine learning rate schedule by step."""

    min_lr: Amount = option(1e-5, "where the cosine ends; scaled with each group's rate")
    warmup_lr: Amount = option(1e-6, "where warm-up starts; scaled with each group's rate")
    warmup_epochs: Amount = option(5.0, "length of warm-up")
    cosine_after_warmup: bool = option(
        False,
        "start the cosine when warm-up is over; otherwise warm-up replaces its beginning",
        action=BooleanOptionalAction,
    )

    def require_rates(self) -> None:
        """Raise ValueError for a warm-up that never ends."""
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs:g} must not exceed epochs={self.epochs}")

    def lr_schedule(self, optimiser: Optimizer, steps_per_epoch: int) -> Any:
        """Return a cosine from the highest rate down, with a linear warm-up."""
        from timm.scheduler import CosineLRScheduler

        rate = optimiser.defaults["lr"]
        warmup = round(self.warmup_epochs * steps_per_epoch)
        steps = self.epochs * steps_per_epoch
        return CosineLRScheduler(
            optimiser,
            t_initial=max(1, steps - warmup) if self.cosine_after_warmup else steps,
            # Rates scale with the batch, these two do not: a small batch must not make them the larger ones.
            lr_min=min(self.min_lr, rate),
            warmup_t=warmup,
            warmup_lr_init=min(self.warmup_lr, rate),
            warmup_prefix=self.cosine_after_warmup,
            t_in_epochs=False,
        )


@dataclass(frozen=True)
class DropSettings(LoopSettings):
    """Settings of a learning rate that drops after certain epochs."""

    lr_drops: list[float] = option([], "epochs after each of which the rate is multiplied by lr_drop")
    lr_drop: Fraction = 0.1
    warmup_steps: Whole = option(500, "length of warm-up")
    warmup_factor: Fraction = option(0.001, "of the rate, where warm-up starts")

    def require_rates(self) -> None:
        """Raise ValueError for a drop that never comes."""
        if any(not 0 < epoch < self.epochs for epoch in self.lr_drops):
            raise ValueError(f"lr_drops={self.lr_drops} must lie between 0 and epochs={self.epochs}")

    def lr_schedule(self, optimiser: Optimizer, steps_per_epoch: int) -> Any:
        """Return a constant rate that drops, with a linear warm-up."""
        from timm.scheduler import MultiStepLRScheduler

        return MultiStepLRScheduler(
            optimiser,
            # timm drops the rate one step before the one that is given.
            decay_t=sorted(round(epochs * steps_per_epoch) + 1 for epochs in self.lr_drops),
            decay_rate=self.lr_drop,
            warmup_t=self.warmup_steps,
            warmup_lr_init=self.warmup_factor * optimiser.defaults["lr"],
            warmup_prefix=False,
            t_in_epochs=False,
        )


def optimiser_and_schedule(
    settings: LoopSettings, groups: Sequence[Mapping[str, Any]], total_batch: int, steps_per_epoch: int
) -> tuple[AdamW, Any]:
    """Return AdamW over parameter groups, and their learning rate schedule.

    Groups are as AdamW takes them, with `lr_scale` where a group's rate is to be multiplied; `names` are left out.
    `total_batch` counts the images of one step, of all processes.
    """
    rate = settings.lr * total_batch / settings.lr_batch
    optimiser = AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups], lr=rate)
    return optimiser, settings.lr_schedule(optimiser, steps_per_epoch)


@dataclass(frozen=True)
class ReductionSettings:
    """Base class of a task's settings: the method, its budget and its options."""

    # Settings that mean nothing without a method, and those that exclude one.
    of_method: ClassVar[tuple[str, ...]] = (*BUDGETS, "linkage", "proportional", "method_options")
    of_no_method: ClassVar[tuple[str, ...]] = ()

    method: str = option("none", "atc, tome, evit, ... or none to train the dense model")
    keep_rate: float | None = option(None, "fraction of patch tokens that stays at each of three stages")
    flops: float | None = option(None, f"in place of keep_rate: {FLOPS_HELP}")
    threshold: float | None = option(
        None, "in place of keep_rate: the cosine distance up to which tokens merge at each of three stages"
    )
    schedule: str | None = option(
        None, "in place of keep_rate: such as stages:0.9,0.7,0.5,blocks=[3,6,9], constant:16 or linear:16"
    )
    linkage: str | None = option(None, "of atc: single, average, complete")
    proportional: bool | None = option(
        None, "let merged tokens weigh as much in attention as their members; none leaves it to the method"
    )
    method_options: dict[str, Any] = option({}, "further options of the method, by name")

    @property
    def config(self) -> ReductionConfig | None:
        """The reduction applied while the run trains; None for the dense model."""
        if self.method == "none":
            return None
        names = ReductionSettings.of_method[:-1]
        named = {name: value for name in names if (value := getattr(self, name)) is not None}
        return ReductionConfig.of(self.method, **named, **self.method_options)

    def require_reduction(self) -> None:
        """Raise ValueError unless there is a method with a budget, or neither it nor any setting `of_method`."""
        if self.method == "none":
            for name in self.of_method:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)!r} needs a method, such as --method atc")
        elif all(getattr(self, name) is None for name in BUDGETS):
            raise ValueError(f"method={self.method!r} needs one of {', '.join(BUDGETS)}")
        _ = self.config  # raises for what does not go together


def trace_if_reduced(model: nn.Module) -> AbstractContextManager[Trace | None]:
    """Trace the model's passes, for what its method adds to a loss; yields None where nothing is applied to it."""
    return trace(model) if applied_modules(model) else nullcontext()
