"""Order and augmentation depend on the seed, the epoch and the position in it alone."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from agglo.lab.training.batches import ImageBatches, MemoryBatches, Share, epoch_order, shifted
from agglo.models.inputs import Inputs
from agglo.utils.randomness import derived_seed


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_processes_share_a_step_without_rest(batch: int, accumulation: int, processes: int, step: int) -> None:
    parts = [list(Share(batch, accumulation, processes, n).batches(step, step + 1)) for n in range(processes)]
    positions = [position for part in parts for at in part for position in at]
    total = batch * accumulation * processes
    assert sorted(positions) == list(range(step * total, (step + 1) * total))
    assert all(len(at) == batch for part in parts for at in part)
    # The first batch of all processes is the first batch of one process that takes as many images at once.
    together = [position for part in parts for position in part[0]]
    assert sorted(together) == list(next(Share(batch * processes, accumulation).batches(step, step + 1)))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 3))
def test_order_is_a_shuffle_with_repeats_in_a_row(n: int, repeats: int, epoch: int) -> None:
    order = epoch_order(n, 0, epoch, repeats)
    assert len(order) == n
    runs = order[::repeats]
    assert len(set(runs)) == len(runs) and set(runs) <= set(range(n))
    assert order == [image for image in runs for _ in range(repeats)][:n]
    assert order == epoch_order(n, 0, epoch, repeats)


def test_order_differs_between_epochs_and_seeds() -> None:
    assert epoch_order(50, 0, 0) != epoch_order(50, 0, 1) != epoch_order(50, 1, 0)
    assert derived_seed(0, "a", 1) != derived_seed(0, "b", 1) != derived_seed(0, "a", 11)


@given(st.integers(0, 3), st.integers(0, 10**6))
def test_shifted_is_a_crop_of_the_padded_image(pad: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (3, 2, 5, 7), generator=draws, dtype=torch.uint8)
    offsets = torch.randint(0, 2 * pad + 1, (3, 2), generator=draws)
    expected = [
        v2.functional.crop(v2.functional.pad(image, [pad] * 4), int(top), int(left), 5, 7)
        for image, (top, left) in zip(images, offsets, strict=True)
    ]
    assert torch.equal(shifted(images, offsets, pad), torch.stack(expected))


def memory(share: Share, **options: Any) -> MemoryBatches:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 1, 6, 6), generator=draws, dtype=torch.uint8)
    prepare = Inputs((6, 6), (0.5,), (0.25,)).normalise
    settings: dict[str, Any] = {"prepare": prepare, "seed": 3, "shift": 2, "flip": 0.5}
    return MemoryBatches(images, torch.arange(20), share, **{**settings, **options})


def test_memory_batches_go_on_from_any_step() -> None:
    data = memory(Share(2, accumulation=2))
    whole = list(data.batches(1, 0, 5))
    torch.rand(17)
    for first in range(6):
        for (inputs, targets), (same, as_before) in zip(
            data.batches(1, first, 5), islice(whole, 2 * first, None), strict=True
        ):
            assert torch.equal(inputs, same) and torch.equal(targets, as_before)


def test_two_processes_see_what_one_would() -> None:
    one = list(memory(Share(4)).batches(0, 0, 5))
    two = [list(memory(Share(2, processes=2, process=process)).batches(0, 0, 5)) for process in range(2)]
    for (inputs, targets), *parts in zip(one, *two, strict=True):
        assert torch.equal(torch.stack([part[0] for part in parts], 1).flatten(0, 1), inputs)
        assert torch.equal(torch.stack([part[1] for part in parts], 1).flatten(), targets)


class Noisy(Dataset[Any]):
    """An image that is drawn each time it is asked for, as augmentations draw."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3) + index, index


@pytest.mark.parametrize("workers", [0, 2])
def test_image_batches_do_not_depend_on_workers_or_on_where_they_start(workers: int) -> None:
    whole = list(ImageBatches(Noisy(), Share(2), seed=0).batches(4, 0, 6))
    rest = list(ImageBatches(Noisy(), Share(2), seed=0, workers=workers).batches(4, 2, 6))
    for (inputs, targets), (same, as_before) in zip(rest, whole[2:], strict=True):
        assert torch.equal(inputs, same) and torch.equal(targets, as_before)
    other = next(ImageBatches(Noisy(), Share(2), seed=1).batches(4, 0, 6))
    assert not torch.equal(other[0], whole[0][0])
