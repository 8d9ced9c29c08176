"""The idx files of Fashion-MNIST, plain or .gz."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agglo.embedded import FASHION_CLASSES as CLASSES

PREFIXES = {"train": "train", "val": "t10k"}
FOLDERS = ("", "FashionMNIST/raw", "raw")  # the files themselves, or as torchvision lays them
_UNSIGNED_BYTES = 8


def read_split(root: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images (N, H, W) and labels (N,) of a split: train or val."""
    prefix = PREFIXES[split]
    image_file = find_idx(root, f"{prefix}-images-idx3-ubyte")
    label_file = find_idx(root, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise ValueError(f"{str(image_file)!r} holds {len(images)} images, {str(label_file)!r} {len(labels)} labels")
    if labels.size and labels.max() >= len(CLASSES):
        raise ValueError(f"{str(label_file)!r} holds label {labels.max()}; accepted: 0 to {len(CLASSES) - 1}")
    return images, labels


def find_idx(root: Path, name: str) -> Path:
    """Return the path of an idx file, plain or .gz, in the root or where torchvision puts it."""
    for folder in FOLDERS:
        for ending in ("", ".gz"):
            if (path := root / folder / (name + ending)).is_file():
                return path
    raise ValueError(f"{name} is missing, plain or .gz, in {str(root)!r}")


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read bytes: two zeros, a type, the number of dimensions, each extent as big-endian int32, then the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} cannot be unpacked: {error}") from error
    head = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)) or len(content) < head:
        raise ValueError(f"{str(path)!r} is no idx file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(content[4:head], ">i4")
    if len(content) - head != shape.prod(dtype=np.int64):
        raise ValueError(f"{str(path)!r} holds {len(content) - head} bytes, but its head promises {shape.tolist()}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape.tolist())


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write an idx file as .gz, without a time stamp, so that the same values give the same file."""
    head = bytes((0, 0, _UNSIGNED_BYTES, values.ndim)) + np.asarray(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + values.tobytes(), mtime=0))
