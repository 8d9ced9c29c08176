"""Everything that decides what the training of the generator does."""

from __future__ import annotations

from dataclasses import dataclass

from agglo.experiments.training.settings import Amount, AtLeastOne, Precision, Share, Whole, require_limits


@dataclass(frozen=True)
class GeneratorSettings:
    """As the embedded weights were trained; the loop of `experiments.training` reads most of these."""

    epochs: AtLeastOne = 4
    """passes over the training images"""
    window_epochs: Whole = 3
    """of them, at first, with a quarter of each image: a window of 8 x 8 tokens, four times as fast"""
    batch_size: AtLeastOne = 64
    """of one process and one accumulation step"""
    accumulation: AtLeastOne = 1
    """batches whose gradients make one step"""
    lr: Amount = 1e-3
    """highest rate of AdamW, at a total batch of lr_batch, and in proportion at others"""
    lr_batch: AtLeastOne = 64
    """total batch (batch_size x accumulation x processes) that lr is for"""
    min_lr: Amount = 1e-5
    """where the cosine ends"""
    warmup_lr: Amount = 1e-6
    """where warm-up starts"""
    warmup_epochs: Amount = 0.1
    """length of warm-up"""
    cosine_after_warmup: bool = False
    """start the cosine when warm-up is over; otherwise warm-up replaces its beginning"""
    weight_decay: Amount = 0.0
    """of AdamW"""
    clip_grad: Amount = 1.0
    """largest gradient norm; 0 is no limit"""
    ema_decay: Share = 0.999
    """of the average of the weights, which is what generates; 0 is none"""
    ema_warmup: bool = True
    """let the average forget faster at first"""
    class_dropout: Share = 0.1
    """fraction of images whose class is hidden, for classifier-free guidance"""
    flip: Share = 0.0
    """probability of mirroring an image: shoes of Fashion-MNIST all point to the left"""
    validation_images: AtLeastOne = 1000
    """test images the validation loss is taken on"""
    evaluate_first: bool = False
    """before training too: a row of the log, never the best one"""
    evaluate_every: AtLeastOne = 1
    """epochs from one evaluation to the next; after the last one always"""
    precision: Precision = "no"
    """mixed precision: no, bf16, fp16, or auto: fp16 on GPUs and none on CPUs"""
    seed: Whole = 0
    """of the starting weights, the order of images and the noise"""
    checkpoint_minutes: Amount = 5.0
    """longest time between checkpoints"""
    tracker: str = "none"
    """besides log.csv: tensorboard, wandb, or any other that Accelerate knows"""

    def __post_init__(self) -> None:
        require_limits(self)
        if self.window_epochs > self.epochs:
            raise ValueError(f"window_epochs={self.window_epochs} must not exceed epochs={self.epochs}")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs:g} must not exceed epochs={self.epochs}")


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"checkpoint_minutes", "tracker"})
