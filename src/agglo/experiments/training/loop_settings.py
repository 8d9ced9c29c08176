"""The settings that the training loop itself reads: what every task's own settings build on."""

from __future__ import annotations

from dataclasses import dataclass, field

from agglo.experiments.training.settings import Amount, AtLeastOne, Precision, Share, Whole


@dataclass(frozen=True)
class LoopSettings:
    """Of AdamW, the average of the weights, and how a run goes. Tasks change defaults as they need."""

    epochs: AtLeastOne = 30
    """passes over the training images"""
    batch_size: AtLeastOne = 64
    """of one process and one accumulation step"""
    accumulation: AtLeastOne = 1
    """batches whose gradients make one step"""
    lr: Amount = 1e-3
    """highest, at a total batch (batch_size x accumulation x processes) of lr_batch, and in proportion at others"""
    lr_batch: AtLeastOne = 64
    """total batch that lr is for"""
    weight_decay: Amount = 0.05
    """of AdamW"""
    clip_grad: Amount = 0.0
    """largest gradient norm; 0 is no limit"""
    ema_decay: Share = 0.0
    """of the average of the weights; 0 is none"""
    ema_warmup: bool = False
    """let the average forget faster at first"""
    seed: Whole = 0
    """of all that is drawn"""
    precision: Precision = "no"
    """mixed precision: no, bf16, fp16, or auto: fp16 on GPUs and none on CPUs"""
    evaluate_first: bool = False
    """before training too: a row of the log, never the best one"""
    evaluate_every: AtLeastOne = 1
    """epochs from one evaluation to the next; after the last one always"""
    checkpoint_minutes: Amount = 10.0
    """longest time between checkpoints"""
    tracker: str = "none"
    """besides log.csv: tensorboard, wandb, or any other that Accelerate knows"""


@dataclass(frozen=True)
class CosineSettings(LoopSettings):
    """A rate that falls as a cosine, step by step."""

    min_lr: Amount = 1e-5
    """where the cosine ends; scaled with each group's rate"""
    warmup_lr: Amount = 1e-6
    """where warm-up starts; scaled with each group's rate"""
    warmup_epochs: Amount = 5.0
    """length of warm-up"""
    cosine_after_warmup: bool = False
    """start the cosine when warm-up is over; otherwise warm-up replaces its beginning"""

    def require_rates(self) -> None:
        """ValueError for a warm-up that never ends."""
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs:g} must not exceed epochs={self.epochs}")


@dataclass(frozen=True)
class DropSettings(LoopSettings):
    """A rate that drops after certain epochs."""

    lr_drops: list[float] = field(default_factory=list)
    """epochs after each of which the rate is multiplied by lr_drop"""
    lr_drop: Share = 0.1
    warmup_steps: Whole = 500
    """length of warm-up"""
    warmup_factor: Share = 0.001
    """of the rate, where warm-up starts"""

    def require_rates(self) -> None:
        """ValueError for a drop that never comes."""
        late = [epoch for epoch in self.lr_drops if not 0 < epoch < self.epochs]
        if late:
            raise ValueError(
                f"lr_drops={self.lr_drops}: {late[0]:g} must lie in 0 to epochs={self.epochs}, without both"
            )
