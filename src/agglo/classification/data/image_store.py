"""The images of an evaluation: decoded once and kept as bytes if they fit in memory, otherwise decoded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from accelerate import Accelerator

GIGABYTE = 1e9


class ImageStore:
    """Batches of one data set, as often as they are asked for.

    data: [i] -> (bytes (C, H, W), target).
    accelerator: gives every process its share, which is then all that it keeps.
    """

    def __init__(self, data: Any, batch_size: int, *, workers: int = 0, accelerator: Accelerator | None = None) -> None:
        self._data, self._batch_size, self._workers, self._accelerator = data, batch_size, workers, accelerator
        self._kept: dict[int, tuple[Any, Any]] | None = None

    @property
    def bytes_needed(self) -> int:
        """Memory this process would take to keep all its images."""
        processes = 1 if self._accelerator is None else self._accelerator.num_processes
        return int(self._data[0][0].nbytes) * -(-len(self._data) // processes)

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def loader(self) -> Any:
        """Batches (B, C, H, W), targets; the same ones in the same order every time."""
        if self._kept is not None:
            return self._load(_Kept(self._kept, len(self._data)), 0)
        return self._load(self._data, self._workers)

    def keep(self, advance: Callable[[int], None]) -> None:
        """Decode everything now. advance: called with the number of images after each batch."""
        kept: dict[int, tuple[Any, Any]] = {}
        for numbers, images, targets in self._load(_Numbered(self._data), self._workers):
            # What workers send lies in shared memory, with open files for as long as it is kept.
            images, targets = images.clone(), targets.clone()
            for number, image, target in zip(numbers.tolist(), images, targets, strict=True):
                kept[number] = (image, target)
            advance(len(numbers))
        self._kept = kept

    def _load(self, data: Dataset[Any], workers: int) -> Any:
        loader = DataLoader(data, self._batch_size, num_workers=workers)
        return (
            loader
            if self._accelerator is None
            else self._accelerator.prepare_data_loader(loader, device_placement=False)
        )


class _Numbered(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Any]:
        return (index, *self._data[index])


class _Kept(Dataset[Any]):
    """length: of the whole data set, of which another process keeps the rest."""

    def __init__(self, kept: dict[int, tuple[Any, Any]], length: int) -> None:
        self._kept, self._length = kept, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._kept[index]
