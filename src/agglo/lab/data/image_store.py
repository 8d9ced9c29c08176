"""The images of an evaluation: decoded once and kept as bytes if they fit in memory, otherwise decoded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

if TYPE_CHECKING:
    from accelerate import Accelerator

GIGABYTE = 1e9


class ImageStore:
    """Batches of one data set, the same ones every time.

    Args:
        data: Returns an image as bytes (C, H, W) and its target for an index.
        batch_size: Number of images in every batch but the last.
        workers: Processes that decode.
        accelerator: Gives every process its share, which is then all that it keeps. The last batches are filled up
            with images from the start, so that all processes have as many.
    """

    def __init__(self, data: Any, batch_size: int, *, workers: int = 0, accelerator: Accelerator | None = None) -> None:
        self._data, self._batch_size, self._workers, self._accelerator = data, batch_size, workers, accelerator
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_needed(self) -> int:
        """Bytes that this process needs to keep all its images."""
        processes = 1 if self._accelerator is None else self._accelerator.num_processes
        return int(self._data[0][0].nbytes) * -(-len(self._data) // processes)

    @property
    def kept(self) -> bool:
        return bool(self._kept)

    def loader(self) -> Any:
        """Return the batches: images (B, C, H, W) and targets."""
        if self._kept:
            kept: Any = self._kept
            return self._load(Subset(kept, range(len(self._data))), 0)
        return self._load(self._data, self._workers)

    def keep(self, advance: Callable[[int], None]) -> None:
        """Decode everything and keep it. advance: called with the number of images after each batch."""
        for indices, (images, targets) in self._load(_Indexed(self._data), self._workers):
            # What workers send lies in shared memory, with open files for as long as it is kept: hence the copies.
            self._kept.update(zip(indices.tolist(), zip(images.clone(), targets.clone(), strict=True), strict=True))
            advance(len(indices))

    def _load(self, data: Dataset[Any], workers: int) -> Any:
        loader = DataLoader(data, self._batch_size, num_workers=workers)
        if self._accelerator is None:
            return loader
        return self._accelerator.prepare_data_loader(loader, device_placement=False)


class _Indexed(Dataset[Any]):
    """A data set whose items come with their indices."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]
