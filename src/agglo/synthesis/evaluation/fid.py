"""agglo fid: the Frechet distance between folders of images, or statistics of them that were kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from agglo.experiments.progress import progress
from agglo.synthesis.evaluation.features import Features, image_files, opened
from agglo.synthesis.evaluation.frechet import Floats, Statistics

if TYPE_CHECKING:
    from PIL.Image import Image


def statistics_of(
    source: Path, features: Callable[[], Features], *, batch_size: int = 32, keep: Path | None = None
) -> Statistics:
    """Of a folder of images, or from an .npz file.

    features: gives what computes them; called for a folder only. keep: where to write those of a folder.
    """
    if source.suffix == ".npz":
        if keep is not None:
            raise ValueError(f"{str(source)!r} holds statistics already: there is nothing to keep in {str(keep)!r}")
        return Statistics.load(source)
    files = image_files(source)
    found = Statistics.of(features_of(opened(files), features(), len(files), batch_size=batch_size, name=source.name))
    if keep is not None:
        found.save(keep)
    return found


def features_of(
    images: Iterable[Image], features: Features, count: int, *, batch_size: int = 32, name: str = "images"
) -> Floats:
    """(count, D), in batches. count: how many images there are, for the progress bar."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    parts = []
    total = -(-count // batch_size)
    with progress(total, f"{features.name} of {name}", every_seconds=10) as tell:
        for batch in in_batches(images, batch_size):
            parts.append(features(batch))
            tell("")
    return torch.cat(parts).numpy().astype(np.float64)


def in_batches(images: Iterable[Image], size: int) -> Iterator[Sequence[Image]]:
    """Lists of `size`, the last one perhaps shorter."""
    batch: list[Image] = []
    for image in images:
        batch.append(image)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
