"""Fashion-MNIST from its four idx files, plain or .gz."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.lab.data.fashion_mnist import CLASSES, FOLDERS, PREFIXES, read_split
from agglo.lab.tasks.classification.data import Augmentation, DataSet, Listing, register


@dataclass(frozen=True)
class Pixels:
    """Grey images of one array (N, H, W)."""

    array: NDArray[np.uint8]
    source: str

    def __len__(self) -> int:
        return len(self.array)

    def open(self, index: int) -> Any:
        from PIL import Image

        return Image.fromarray(self.array[index])

    def name(self, index: int) -> str:
        return f"{self.source}[{index}]"

    def size(self, index: int) -> int:
        return self.array[index].nbytes

    def content(self, index: int) -> bytes:
        return self.array[index].tobytes()


def read_fashion_mnist(root: Path, split: str) -> Listing:
    images, labels = read_split(root, split)
    return Listing(list(CLASSES), Pixels(images, f"{PREFIXES[split]}-images"), labels.tolist())


register(
    DataSet(
        "fashion-mnist",
        "Fashion-MNIST: its four idx files, plain or .gz, as such or as torchvision lays them",
        read_fashion_mnist,
        signs=tuple(f"{folder}/t10k-images-idx3-ubyte*".lstrip("/") for folder in FOLDERS),
        crop=1.0,
        augmentation=Augmentation(shift=2, randaugment=None, erasing=0.0),
    )
)
