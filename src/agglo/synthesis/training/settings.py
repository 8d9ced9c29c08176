"""Everything that decides what the training of the generator does."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import cast


@dataclass(frozen=True)
class GeneratorSettings:
    """As the embedded weights were trained; the loop of `experiments.training` reads most of these."""

    epochs: int = 4
    """passes over the training images"""
    window_epochs: int = 3
    """of them, at first, with a quarter of each image: a window of 8 x 8 tokens, four times as fast"""
    batch_size: int = 64
    """of one process and one accumulation step"""
    accumulation: int = 1
    """batches whose gradients make one step"""
    lr: float = 1e-3
    """highest rate of AdamW, at a total batch of lr_batch, and in proportion at others"""
    lr_batch: int = 64
    """total batch (batch_size x accumulation x processes) that lr is for"""
    min_lr: float = 1e-5
    """where the cosine ends"""
    warmup_lr: float = 1e-6
    """where warm-up starts"""
    warmup_epochs: float = 0.1
    """length of warm-up"""
    cosine_after_warmup: bool = False
    """start the cosine when warm-up is over; otherwise warm-up replaces its beginning"""
    weight_decay: float = 0.0
    """of AdamW"""
    clip_grad: float = 1.0
    """largest gradient norm; 0 is no limit"""
    ema_decay: float = 0.999
    """of the average of the weights, which is what generates; 0 is none"""
    ema_warmup: bool = True
    """let the average forget faster at first"""
    class_dropout: float = 0.1
    """fraction of images whose class is hidden, for classifier-free guidance"""
    flip: float = 0.0
    """probability of mirroring an image: shoes of Fashion-MNIST all point to the left"""
    validation_images: int = 1000
    """test images the validation loss is taken on"""
    evaluate_first: bool = False
    """before training too: a row of the log, never the best one"""
    evaluate_every: int = 1
    """epochs from one evaluation to the next; after the last one always"""
    precision: str = "no"
    """mixed precision: no, bf16, fp16, or auto: fp16 on GPUs and none on CPUs"""
    seed: int = 0
    """of the starting weights, the order of images and the noise"""
    checkpoint_minutes: float = 5.0
    """longest time between checkpoints"""
    tracker: str = "none"
    """besides log.csv: tensorboard, wandb, or any other that Accelerate knows"""

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {least}")
        for name in ("ema_decay", "class_dropout", "flip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in 0 to 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.window_epochs > self.epochs:
            raise ValueError(f"window_epochs={self.window_epochs} must not exceed epochs={self.epochs}")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs:g} must not exceed epochs={self.epochs}")


PRECISIONS = ("no", "bf16", "fp16", "auto")
# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"checkpoint_minutes", "tracker"})
_AT_LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "accumulation", "lr_batch", "validation_images", "evaluate_every"), 1),
    **dict.fromkeys(("lr", "min_lr", "warmup_lr", "warmup_epochs", "weight_decay", "clip_grad"), 0),
    **dict.fromkeys(("seed", "checkpoint_minutes", "window_epochs"), 0),
}


def explanations() -> dict[str, str]:
    """What each setting means, from the text below it in the class."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(GeneratorSettings)).body[0]).body
    return {
        item.target.id: text.value.value
        for item, text in pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
