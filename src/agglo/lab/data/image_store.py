"""The images of an evaluation: decoded once and kept as bytes if they fit in memory, otherwise decoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from accelerate import Accelerator

GIGABYTE = 1e9


class ImageStore:
    """Batches of one data set, the same ones every time.

    Args:
        data: [i] -> (bytes (C, H, W), target).
        batch_size: Number of images in every batch but the last.
        workers: Processes that decode.
        accelerator: Gives every process its share, which is then all that it keeps. The last batches are filled up
            with images from the start, so that all processes have as many.
        collate: Makes a batch of a list of items; None stacks images of one size and their targets.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        workers: int = 0,
        accelerator: Accelerator | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._data, self._batch_size, self._workers, self._accelerator = data, batch_size, workers, accelerator
        self._collate = collate
        self._kept: dict[int, Any] | None = None

    @property
    def bytes_needed(self) -> int:
        """Bytes that this process would take to keep all its images, if they were all like the first."""
        processes = 1 if self._accelerator is None else self._accelerator.num_processes
        return int(self._data[0][0].nbytes) * -(-len(self._data) // processes)

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def loader(self) -> Any:
        """Return the batches: (B, C, H, W) and targets, or what collate makes."""
        if self._kept is not None:
            return self._load(_Kept(self._kept, len(self._data)), 0, self._collate)
        return self._load(self._data, self._workers, self._collate)

    def keep(self, advance: Callable[[int], None]) -> None:
        """Decode everything and keep it. advance: called with the number of images after each batch."""
        kept: dict[int, Any] = {}
        for items in self._load(_Numbered(self._data), self._workers, list):
            for number, item in items:
                # What workers send lies in shared memory, with open files for as long as it is kept.
                kept[number] = _own(item)
            advance(len(items))
        self._kept = kept

    def _load(self, data: Dataset[Any], workers: int, collate: Callable[[list[Any]], Any] | None) -> Any:
        loader = DataLoader(data, self._batch_size, num_workers=workers, collate_fn=collate)
        return (
            loader
            if self._accelerator is None
            else self._accelerator.prepare_data_loader(loader, device_placement=False)
        )


def _own(item: Any) -> Any:
    """Copy every tensor in an item."""
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, Mapping):
        return {key: _own(value) for key, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return tuple(_own(value) for value in item)
    return item


class _Numbered(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]


class _Kept(Dataset[Any]):
    """The images of this process. length: of the whole data set."""

    def __init__(self, kept: dict[int, Any], length: int) -> None:
        self._kept, self._length = kept, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._kept[index]
