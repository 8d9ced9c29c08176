"""Image files, and the images of an evaluation: kept or decoded again, on workers or not, the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from agglo.lab.data.image_files import require_image_name
from agglo.lab.data.image_store import ImageStore


class Counted(Dataset[Any]):
    """Images of different sizes, and how often they were asked for."""

    def __init__(self, same_size: bool) -> None:
        self.asked, self._same = 0, same_size

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        image = torch.full((1, 2, 2 if self._same else index + 1), index, dtype=torch.uint8)
        return image, index if self._same else {"image_id": index, "size": (2, index + 1), "path": str(Path("a"))}


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_one_size_are_stacked(workers: int) -> None:
    data = Counted(True)
    store = ImageStore(data, 3, workers=workers)
    assert store.bytes_needed == 7 * 4
    before = list(store.loader())
    seen: list[int] = []
    store.keep(seen.append)
    asked = data.asked
    after = list(store.loader())
    assert seen == [3, 3, 1] and store.kept and data.asked == asked
    assert [images.shape for images, _ in after] == [(3, 1, 2, 2), (3, 1, 2, 2), (1, 1, 2, 2)]
    for (images, targets), (others, other_targets) in zip(before, after, strict=True):
        assert torch.equal(images, others) and torch.equal(targets, other_targets)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_different_sizes_stay_lists(workers: int) -> None:
    store = ImageStore(Counted(False), 3, workers=workers, collate=tuple)
    before = list(store.loader())
    store.keep(lambda images: None)
    after = list(store.loader())
    assert [len(batch) for batch in after] == [3, 3, 1]
    for batch, other in zip(before, after, strict=True):
        for (image, target), (other_image, other_target) in zip(batch, other, strict=True):
            assert torch.equal(image, other_image) and target == other_target


def test_a_path_that_is_no_image_is_refused(tmp_path: Path) -> None:
    assert require_image_name(tmp_path / "a.gif") == tmp_path / "a.gif"
    with pytest.raises(ValueError, match="output="):
        require_image_name(tmp_path / "a.txt")
