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
    """Seven images, and how often they were asked for."""

    asked = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return torch.full((1, 2, 2), index, dtype=torch.uint8), index


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_images_are_those_that_were_decoded(workers: int) -> None:
    data = Counted()
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


def test_a_path_that_is_no_image_is_refused(tmp_path: Path) -> None:
    assert require_image_name(tmp_path / "a.gif") == tmp_path / "a.gif"
    with pytest.raises(ValueError, match="output="):
        require_image_name(tmp_path / "a.txt")
