"""Everything that decides what the training of the generator does."""

from __future__ import annotations

from dataclasses import dataclass

from agglo.experiments.training.loop_settings import CosineSettings
from agglo.experiments.training.settings import Amount, AtLeastOne, Share, Whole, require_limits


@dataclass(frozen=True)
class GeneratorSettings(CosineSettings):
    """As the embedded weights were trained, but for their precision, which was bf16."""

    epochs: AtLeastOne = 6
    window_epochs: Whole = 4
    """of them, at first, with a quarter of each image: a window of 8 x 8 tokens, four times as fast"""
    warmup_epochs: Amount = 0.1
    weight_decay: Amount = 0.0
    clip_grad: Amount = 1.0
    ema_decay: Share = 0.999
    """of the average of the weights, which is what generates; 0 is none"""
    ema_warmup: bool = True
    class_dropout: Share = 0.1
    """fraction of images whose class is hidden, for classifier-free guidance"""
    flip: Share = 0.0
    """probability of mirroring an image: shoes of Fashion-MNIST all point to the left"""
    validation_images: AtLeastOne = 1000
    """test images the validation loss is taken on"""
    checkpoint_minutes: Amount = 5.0

    def __post_init__(self) -> None:
        require_limits(self)
        if self.window_epochs > self.epochs:
            raise ValueError(f"window_epochs={self.window_epochs} must not exceed epochs={self.epochs}")
        self.require_rates()


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"checkpoint_minutes", "tracker"})
