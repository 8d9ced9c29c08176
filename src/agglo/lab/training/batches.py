"""Training batches: which images a process sees in which order, from any epoch and step on.

Order and augmentation depend on the seed, the epoch and the position in it, on nothing else. So a resumed run sees what
it would have seen, and two processes see together what one of twice the batch would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from agglo.utils.randomness import derived_seed, generator, seed_everything

Batch = tuple[Any, Any]  # inputs and targets, tensors or whatever a task's objective takes


@dataclass(frozen=True)
class Share:
    """Division of a step's images: `accumulation` batches for each of several processes."""

    batch_size: int
    accumulation: int = 1
    processes: int = 1
    process: int = 0

    @property
    def total(self) -> int:
        """Images of one step, all processes together."""
        return self.batch_size * self.accumulation * self.processes

    def batches(self, first_step: int, n_steps: int) -> Iterator[range]:
        """Yield the positions in the epoch of each of this process's batches.

        Neighbours go to different processes, so that the copies of repeated augmentation do not meet in one batch.
        """
        at_once = self.batch_size * self.processes
        for start in range(first_step * self.total, n_steps * self.total, at_once):
            yield range(start + self.process, start + at_once, self.processes)


def epoch_order(n_images: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """Return the image at each position of an epoch: shuffled, each `repeats` times in a row, cut to n_images."""
    from timm.data.distributed_sampler import RepeatAugSampler

    sampler = RepeatAugSampler(range(n_images), num_replicas=1, rank=0, num_repeats=repeats, selected_round=0)
    sampler.set_epoch(derived_seed(seed, "order", epoch))
    return list(sampler)


class _Seeded(Dataset[Any]):
    """A dataset indexed by (image, position in the epoch), which seeds the augmentations by the position."""

    def __init__(self, data: Dataset[Any], seed: int, epoch: int) -> None:
        self.data, self.seed, self.epoch = data, seed, epoch

    def __getitem__(self, where: tuple[int, int]) -> Any:
        index, position = where
        seed_everything(self.seed, "image", self.epoch, position)
        return self.data[index]


@dataclass(frozen=True)
class ImageBatches:
    """Images of a dataset one by one, through its transform, in worker processes; collate None stacks them."""

    data: Dataset[Any]
    share: Share
    seed: int
    repeats: int = 1
    workers: int = 0
    collate: Callable[[list[Any]], Batch] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def batches(self, epoch: int, first_step: int, n_steps: int) -> Iterator[Batch]:
        """Yield this process's batches of steps first_step to n_steps - 1, `accumulation` for each."""
        order = epoch_order(len(self), self.seed, epoch, self.repeats)
        yield from DataLoader(
            _Seeded(self.data, self.seed, epoch),
            batch_sampler=([(order[at], at) for at in batch] for batch in self.share.batches(first_step, n_steps)),
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
        )


@dataclass(frozen=True)
class MemoryBatches:
    """Small images of one size, all in memory; whole batches are shifted and flipped."""

    images: Tensor  # (N, C, H, W) uint8
    targets: Tensor  # (N,) or (N, classes)
    share: Share
    prepare: Callable[[Tensor], Tensor]  # turns a batch of images into inputs, such as by normalisation
    seed: int
    repeats: int = 1  # copies in repeated augmentation
    shift: int = 0  # pixels an image moves at most, along each axis; what comes in is black
    flip: float = 0.0  # probability

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, epoch: int, first_step: int, n_steps: int) -> Iterator[Batch]:
        """Yield batches as `ImageBatches` does."""
        order = torch.tensor(epoch_order(len(self), self.seed, epoch, self.repeats))
        draws = generator(self.seed, "shift and flip", epoch)
        offsets = torch.randint(0, 2 * self.shift + 1, (len(self), 2), generator=draws)
        mirrored = torch.rand(len(self), generator=draws) < self.flip
        for positions in self.share.batches(first_step, n_steps):
            at = torch.tensor(positions)
            images = shifted(self.images[order[at]], offsets[at], self.shift)
            images = torch.where(mirrored[at].view(-1, 1, 1, 1), images.flip(-1), images)
            yield self.prepare(images), self.targets[order[at]]


TrainingData: TypeAlias = ImageBatches | MemoryBatches


def shifted(images: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Crop images (B, C, H, W), padded by `pad` black pixels, at offsets (B, 2) in 0 to 2 pad."""
    height, width = images.shape[-2:]
    windows = torch.nn.functional.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images)), :, offsets[:, 0], offsets[:, 1]]
