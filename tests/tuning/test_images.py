"""Images come in many forms, and search and confirmation never share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from agglo.tuning.images import TuneImages, split


def numbered(count: int) -> torch.Tensor:
    """Images that know their number."""
    return torch.arange(count).view(-1, 1, 1, 1).expand(count, 1, 4, 4).float()


def numbers(batches: list[Any]) -> list[int]:
    return [int(image[0, 0, 0]) for batch in batches for image in batch.inputs]


def require_halves(found: TuneImages, count: int) -> None:
    search, confirmation = numbers(found.search), numbers(found.confirmation)
    assert sorted(search + confirmation) == list(range(count))
    assert abs(len(search) - len(confirmation)) <= found.timing.images
    assert (found.about["search"], found.about["confirmation"]) == (len(search), len(confirmation))


def test_a_tensor_is_split_in_halves_in_an_order_of_the_seeds() -> None:
    found = split([(numbered(101), torch.arange(101) + 1000)], batch_size=16)
    require_halves(found, 101)
    for batch in (*found.search, *found.confirmation, found.timing):
        assert batch.labels is not None
        assert numbers([batch]) == [int(label) - 1000 for label in batch.labels]
    assert found.has_labels and found.timing.images == 16 and len(found.timing.inputs) == 16
    assert numbers(split(numbered(101), batch_size=16).search) == numbers(found.search)
    assert numbers(split(numbered(101), batch_size=16, seed=1).search) != numbers(found.search)


def test_few_images_are_repeated_to_fill_the_batch_that_is_timed() -> None:
    found = split(numbered(5))
    assert found.timing.images == 64 and set(numbers([found.timing])) == set(range(5))
    assert len(split(numbered(5000)[:, :, :1, :1]).search) * 32 == 512  # more would only slow the search down


def test_lists_of_images_and_loaders_with_labels_are_the_same_images() -> None:
    images, labels = numbered(20), torch.arange(20)
    require_halves(split(list(images)), 20)
    found = split(DataLoader(TensorDataset(images, labels), batch_size=6))
    require_halves(found, 20)
    assert found.has_labels and found.timing.images == 6
    require_halves(split(iter(images.split(6))), 20)
    assert not split(iter(images.split(6))).has_labels


def test_images_of_several_sizes_stay_lists() -> None:
    found = split([torch.rand(3, 8 + n, 8) for n in range(6)], batch_size=2)
    assert all(isinstance(batch.inputs, list) for batch in found.search)
    assert found.timing.images == 2 and found.about["images"] == 6


def test_batches_of_a_models_arguments_stay_whole() -> None:
    dicts = [{"sample": torch.rand(2, 4, 8, 8), "timestep": torch.tensor(n), "labels": None} for n in range(4)]
    found = split(dicts)
    assert [batch.images for batch in (*found.search, *found.confirmation)] == [2, 2, 2, 2]
    assert set(found.search[0].inputs) == {"sample", "timestep"}
    times = {int(batch.inputs["timestep"]) for batch in (*found.search, *found.confirmation)}
    assert times == {0, 1, 2, 3}
    pairs = [(torch.rand(2, 4, 8, 8), torch.tensor([n, n])) for n in range(4)]
    assert isinstance(split(pairs, tuples_are_inputs=True).search[0].inputs, tuple)
    assert split(pairs).has_labels  # of a classifier


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ("cats/", "images='cats/'"),
        ([], "too few"),
        (torch.rand(1, 3, 4, 4), "too few"),
        ([{"x": torch.rand(2, 3, 4, 4)}], "2 batches"),
        ([(torch.rand(4, 3, 2, 2), torch.tensor([1, 2]))], "one class for each image"),
        ([{"x": 3}], "not dict"),
    ],
)
def test_images_that_cannot_be_used_are_refused(images: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        split(images)
