"""The Frechet distance between two sets of images, and the mean and covariance of their features that it needs.

    |m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1 S2)^(1/2))

Libraries that compute it take the square root of the product S1 S2, which is neither symmetric nor, with fewer images
than features, of full rank: its root may be complex or not exist. tr((S1 S2)^(1/2)) is also the sum of the singular
values of S1^(1/2) S2^(1/2), where both roots are of symmetric matrices: always real, and exact for any rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from agglo.lab.tasks.synthesis.evaluation.features import Features, image_files, opened
from agglo.utils.files import replacing
from agglo.utils.progress import progress

Floats = NDArray[np.float64]


class FewImagesWarning(UserWarning):
    """Fewer images than features: the distance comes out too high, by an amount that depends on their number."""


@dataclass(frozen=True)
class Statistics:
    """Mean (D,) and covariance (D, D) of the features of `count` images; None where a file does not say how many."""

    count: int | None
    mean: Floats
    covariance: Floats

    @classmethod
    def of(cls, features: Floats) -> Statistics:
        """Return the statistics of features (N, D) of at least two images."""
        features = np.asarray(features, dtype=np.float64)
        if features.ndim != 2 or len(features) < 2 or not np.isfinite(features).all():
            raise ValueError(f"features of shape {features.shape}: finite ones (N, D) of at least 2 images fit")
        return cls(len(features), features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False)))

    def save(self, path: Path) -> None:
        """Write an .npz file with `mu` and `sigma`, which pytorch-fid and clean-fid read too, and `count`."""
        with replacing(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, mu=self.mean, sigma=self.covariance, count=-1 if self.count is None else self.count)

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Read an .npz file with `mu` and `sigma`, of this or another library. Nothing in the file is executed."""
        try:
            with np.load(path, allow_pickle=False) as content:
                mean, covariance = (np.asarray(content[name], dtype=np.float64) for name in ("mu", "sigma"))
                count = int(content["count"]) if "count" in content else -1
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{str(path)!r} holds no statistics, an .npz with mu and sigma: {error}") from error
        return cls(None if count < 0 else count, mean, covariance)


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Return the Frechet distance, which is symmetric; warn with FewImagesWarning where a covariance lacks rank."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} numbers cannot be compared")
    dimensions = len(a.mean)
    for side in (a, b):
        if side.count is not None and side.count <= dimensions:
            warnings.warn(
                f"{side.count} images for {dimensions} features: the covariance has rank {side.count - 1} at most, "
                "so compare this distance only with others of the same numbers of images",
                FewImagesWarning,
                stacklevel=2,
            )
    overlap = np.linalg.svd(_root(a.covariance) @ _root(b.covariance), compute_uv=False).sum()
    apart = a.mean - b.mean
    return float(apart @ apart + np.trace(a.covariance) + np.trace(b.covariance) - 2.0 * overlap)


def _root(covariance: Floats) -> Floats:
    """Return the symmetric root of a positive semi-definite matrix; rounding may have left eigenvalues below 0."""
    values, vectors = np.linalg.eigh(covariance)
    root: Floats = (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T
    return root


def statistics_of(
    source: Path, features: Callable[[], Features], *, batch_size: int = 32, keep: Path | None = None
) -> Statistics:
    """Return the statistics in an .npz file, or those of a folder of images, which are kept in a file if wanted.

    `features` returns the feature extractor; it is called for a folder only.
    """
    if source.suffix == ".npz":
        return Statistics.load(source)
    files = image_files(source)
    found = Statistics.of(features_of(opened(files), features(), len(files), batch_size=batch_size, name=source.name))
    if keep is not None:
        found.save(keep)
    return found


def features_of(
    images: Iterable[Image], features: Features, count: int, *, batch_size: int = 32, name: str = "images"
) -> Floats:
    """Return the features (count, D) of `count` images, computed in batches."""
    remaining, parts = iter(images), []
    with progress(-(-count // batch_size), f"features of {name}", every_seconds=10) as tell:
        while batch := list(islice(remaining, batch_size)):
            parts.append(features(batch))
            tell("")
    return torch.cat(parts).numpy().astype(np.float64)
