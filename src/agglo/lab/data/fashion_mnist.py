"""The idx files of Fashion-MNIST, plain or .gz."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agglo.embedded import FASHION_CLASSES

CLASSES = FASHION_CLASSES
PREFIXES = {"train": "train", "val": "t10k"}
FOLDERS = ("", "FashionMNIST/raw", "raw")  # the files themselves, or as torchvision lays them
_UNSIGNED_BYTES = 8


def read_split(root: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read the images (N, H, W) and labels (N,) of a split: train or val."""
    prefix = PREFIXES[split]
    images = read_idx(find_idx(root, f"{prefix}-images-idx3-ubyte"), 3)
    labels = read_idx(find_idx(root, f"{prefix}-labels-idx1-ubyte"), 1)
    if len(images) != len(labels):
        raise ValueError(f"{str(root)!r} holds {len(images)} images, but {len(labels)} labels of split {split!r}")
    return images, labels


def find_idx(root: Path, name: str) -> Path:
    """Return the path of an idx file, plain or .gz, in the root or where torchvision puts it."""
    candidates = [root / folder / (name + ending) for folder in FOLDERS for ending in ("", ".gz")]
    if (found := next(filter(Path.is_file, candidates), None)) is None:
        raise ValueError(f"{name} is missing, plain or .gz, in {str(root)!r}")
    return found


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read bytes: two zeros, a type, the number of dimensions, each extent as big-endian int32, then the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
            raise ValueError(f"it does not hold bytes in {dimensions} dimensions")
        shape = np.frombuffer(content, ">i4", dimensions, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape.tolist())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as an idx file: {error}") from error


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write an idx file as .gz, without a time stamp, so that the same values give the same file."""
    head = bytes((0, 0, _UNSIGNED_BYTES, values.ndim)) + np.asarray(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + values.tobytes(), mtime=0))
