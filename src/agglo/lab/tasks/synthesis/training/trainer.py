"""Training of the embedded generator: its settings, and the task for the training loop."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agglo.embedded import generator
from agglo.lab.data.fashion_mnist import read_split
from agglo.lab.options import Amount, AtLeastOne, Fraction, Whole, option, require_limits
from agglo.lab.training.batches import MemoryBatches, Share
from agglo.lab.training.loop import TrainingTask, train
from agglo.lab.training.settings import CosineSettings
from agglo.utils.randomness import generator as random_generator
from agglo.utils.randomness import seed_everything

_VALIDATION_BATCH = 100
_LEVELS = 10  # noise levels of the validation loss, evenly over the schedule


@dataclass(frozen=True)
class GeneratorSettings(CosineSettings):
    """The settings of the generator's training; the embedded weights had these, but for precision="bf16"."""

    epochs: AtLeastOne = 6
    window_epochs: Whole = option(
        4, "of them, at first, with a quarter of each image: a window of 8 x 8 tokens, four times as fast"
    )
    warmup_epochs: Amount = 0.1
    weight_decay: Amount = 0.0
    clip_grad: Amount = 1.0
    ema_decay: Fraction = option(0.999, "of the average of the weights, which is what generates; 0 is none")
    ema_warmup: bool = True
    class_dropout: Fraction = option(0.1, "fraction of images whose class is hidden, for classifier-free guidance")
    flip: Fraction = option(0.0, "probability of mirroring an image: shoes of Fashion-MNIST all point to the left")
    validation_images: AtLeastOne = option(1000, "test images the validation loss is taken on")
    checkpoint_minutes: Amount = 5.0

    def __post_init__(self) -> None:
        require_limits(self)
        if self.window_epochs > self.epochs:
            raise ValueError(f"window_epochs={self.window_epochs} must not exceed epochs={self.epochs}")
        self.require_rates()


# What may change between two starts of one run: it decides nothing about the weights.
MAY_DIFFER = frozenset({"checkpoint_minutes", "tracker"})


def train_generator(settings: GeneratorSettings, data: Path, output: Path) -> dict[str, Any]:
    """Train on a folder of Fashion-MNIST's idx files, or resume a run; return the best row of its log.

    Started by `accelerate launch` or `torchrun`, all processes call this.
    """
    return train(
        settings,
        data,
        output,
        lambda accelerator, share: Generation(settings, data, share),
        may_differ=MAY_DIFFER,
        name="train-generator",
    )


class Generation(TrainingTask):
    """The training task of the diffusion transformer."""

    ranked_by = "loss"
    lower_is_better = True

    def __init__(self, settings: GeneratorSettings, data: Path, share: Share) -> None:
        from diffusers import DDPMScheduler

        self.settings = settings
        images, labels = (torch.from_numpy(array.copy()) for array in read_split(data, "train"))
        self.images_fingerprint = hashlib.sha256(images.numpy().data).hexdigest()[:16]
        seed_everything(settings.seed, "starting weights")
        self.model = generator.untrained()
        self.grid = generator.SHAPE["sample_size"] // generator.SHAPE["patch_size"]
        self.windowed = False
        self.noise = DDPMScheduler(**generator.NOISE)
        how: dict[str, Any] = {"prepare": generator.to_model, "seed": settings.seed, "flip": settings.flip}
        self.data = MemoryBatches(images[:, None], labels.long(), share, **how)
        self.groups = [{"params": list(self.model.parameters()), "weight_decay": settings.weight_decay}]
        images, labels = (torch.from_numpy(a[: settings.validation_images].copy()) for a in read_split(data, "val"))
        self.validation = generator.to_model(images[:, None]), labels.long()

    def begin_epoch(self, epoch: int) -> None:
        self.windowed = epoch < self.settings.window_epochs

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        count, device = len(inputs), inputs.device
        # One draw from each of `count` equal stretches of the schedule: less noise in the loss than free draws.
        draws = (torch.arange(count, device=device) + torch.rand(count, device=device)) / count
        steps = (draws * self.noise.config.num_train_timesteps).long()
        hidden = torch.rand(count, device=device) < self.settings.class_dropout
        classes = torch.where(hidden, generator.ANY_CLASS, targets)
        noise = torch.randn_like(inputs)
        if not self.windowed:
            return self.error(forward, inputs, classes, steps, noise).mean()
        tokens = random_windows(count, self.grid, self.grid // 2, device)
        with taking(self.model.pos_embed, tokens):  # type: ignore[arg-type]
            return self.error(forward, inputs, classes, steps, noise, tokens).mean()

    def error(
        self, forward: nn.Module, images: Tensor, classes: Tensor, steps: Tensor, noise: Tensor, tokens: Any = None
    ) -> Tensor:
        """Return the mean squared error of the predicted velocity for each image, (B,).

        `tokens` (B, side * side) are those of a square window that the model sees; None is all of them.
        """
        noisy = self.noise.add_noise(images, noise, steps)
        velocity = self.noise.get_velocity(images, noise, steps)
        if tokens is not None:
            velocity = cut(velocity, tokens, generator.SHAPE["patch_size"])
        predicted = forward(noisy, steps, classes).sample
        return (predicted.float() - velocity).square().flatten(1).mean(1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on test images with their classes, at fixed noise levels and with fixed noise."""
        model.eval()
        device = next(model.parameters()).device
        images, classes = self.validation
        noise = torch.randn(images.shape, generator=random_generator("validation noise"))
        steps = (torch.arange(len(images)) % _LEVELS * 2 + 1) * self.noise.config.num_train_timesteps // (2 * _LEVELS)
        total = 0.0
        for part in torch.arange(len(images)).split(_VALIDATION_BATCH):
            values = (value[part].to(device) for value in (images, classes, steps, noise))
            total += float(self.error(model, *values).sum())
        return {"loss": total / len(images)}

    def about(self) -> dict[str, str]:
        return {"model": generator.NAME, "dataset": "fashion-mnist"}

    def fingerprints(self) -> dict[str, str]:
        return {"training images": self.images_fingerprint}


def random_windows(count: int, grid: int, side: int, device: torch.device) -> Tensor:
    """Return token indices (count, side * side) of a random square window for each image on a grid x grid."""
    corner = torch.randint(0, grid - side + 1, (count, 2, 1), device=device)
    along = torch.arange(side, device=device)
    rows, columns = corner[:, 0] + along, corner[:, 1] + along
    return (rows[:, :, None] * grid + columns[:, None, :]).flatten(1)


def cut(images: Tensor, tokens: Tensor, patch: int) -> Tensor:
    """Return the windows (B, C, side * patch, side * patch) of images (B, C, H, W) by their token indices."""
    side = math.isqrt(tokens.shape[1])
    patches = nn.functional.unfold(images, patch, stride=patch)
    taken = patches.gather(2, tokens[:, None, :].expand(-1, patches.shape[1], -1))
    return nn.functional.fold(taken, (side * patch, side * patch), patch, stride=patch)


@contextmanager
def taking(embedding: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Let a model continue with some of its tokens (B, n) only, with their embeddings and positions."""

    def take(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
        return embedded.gather(1, tokens[:, :, None].expand(-1, -1, embedded.shape[2]))

    hook = embedding.register_forward_hook(take)
    try:
        yield
    finally:
        hook.remove()
