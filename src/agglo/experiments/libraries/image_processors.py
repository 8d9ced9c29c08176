"""The image processors of transformers in a few numbers, proved on one picture."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from agglo.experiments.inputs import Inputs, crop_of, evaluation_transform

_INTERPOLATION = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # as PIL numbers them
_PROBE = (150, 101)  # pixels wide and high of the picture that proves it, in hundredths of the image size
# How far pixels may be off, of 255 levels: transformers resizes tensors where timm resizes PIL's pictures.
_TOLERATED = 3.0


def inputs_of(path: str, config: Any) -> Inputs:
    """What the image processor of a folder or name on the hub does. Without one it is the default of the model's kind
    at the model's size, with a warning. ValueError where it does what agglo cannot, found out by doing it."""
    processor = _processor(path, config)
    inputs = _read(processor.to_dict(), type(processor).__name__)
    _require_alike(processor, inputs)
    return inputs


def _processor(path: str, config: Any) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    folder = Path(path).expanduser()
    names = ("preprocessor_config.json", "processor_config.json")
    if path and not (folder.is_dir() and not any((folder / name).is_file() for name in names)):
        try:
            return AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the image processor of {path!r} cannot be read: {' '.join(str(error).split())}"
            ) from error
    try:
        known = IMAGE_PROCESSOR_MAPPING[type(config)]
    except KeyError:
        raise ValueError(
            f"{path or type(config).__name__!r} does not say how pictures are prepared, and transformers knows "
            f"no image processor for {config.model_type}: save one beside it (processor.save_pretrained)"
        ) from None
    kind = known["torchvision"] if isinstance(known, Mapping) else known[-1] or known[0]
    side = _side(config)
    default = kind()
    size = {"shortest_edge": side} if "shortest_edge" in default.size else {"height": side, "width": side}
    where = f"{path} holds no preprocessor_config.json" if path else "the model has no folder"
    warnings.warn(f"{where}: pictures are prepared as {kind.__name__} does by default, at {side} pixels", stacklevel=2)
    return kind(size=size, crop_size={"height": side, "width": side})


def _side(config: Any) -> int:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if size is None:
        raise ValueError(f"{type(config).__name__} has no image_size")
    return int(size if isinstance(size, int) else size[0])


def _read(given: Mapping[str, Any], kind: str) -> Inputs:
    size, crop = given.get("size") or {}, given.get("crop_size") or {}
    short = size.get("shortest_edge")
    resized = (short, short) if short is not None else (size.get("height"), size.get("width"))
    if not given.get("do_resize", True) or None in resized:
        raise ValueError(f"{kind} does not resize pictures to one size (size={dict(size)}), so batches cannot be made")
    final = (crop.get("height"), crop.get("width")) if given.get("do_center_crop") else resized
    if None in final:
        final = (crop.get("shortest_edge"),) * 2
    sides = [(int(a), int(b)) for a, b in zip(final, resized, strict=True)]  # type: ignore[arg-type]
    fractions = {crop_of(a, b) for a, b in sides}
    if len(fractions) > 1:
        raise ValueError(f"{kind} resizes to {resized} and crops to {final}, in other proportions")
    # Pixels are scaled by 1/255 here; another factor is the same as another mean and deviation.
    factor = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if given.get("do_normalize", True):
        mean, std = tuple(given["image_mean"]), tuple(given["image_std"])
    return Inputs(
        (sides[0][0], sides[1][0]),
        tuple(value / factor for value in mean),
        tuple(value / factor for value in std),
        interpolation=_INTERPOLATION[int(given.get("resample", 2))],
        crop=fractions.pop(),
        squash=short is None,
    )


def _require_alike(processor: Any, inputs: Inputs) -> None:
    """ValueError unless a smooth picture comes out as the processor would have it."""
    from PIL import Image

    width, height = (inputs.image_size[0] * part // 100 + 1 for part in _PROBE)
    across = torch.linspace(0, 3, width).expand(height, width)
    down = torch.linspace(0, 2, height)[:, None].expand(height, width)
    waves = torch.stack([(across + down).sin(), (across * down).cos(), (across - 2 * down).sin()], dim=-1)
    picture = Image.fromarray((127.5 + 127 * waves).round().to(torch.uint8).numpy())
    expected = torch.as_tensor(processor(images=picture, return_tensors="pt")["pixel_values"])[0]
    found = evaluation_transform(inputs)(picture)
    std = torch.tensor(inputs.std).view(-1, 1, 1)
    if expected.shape != found.shape:
        raise ValueError(
            f"{type(processor).__name__} prepares pictures in a way that agglo does not know: {tuple(expected.shape)} "
            f"where {tuple(found.shape)} was expected"
        )
    # Where an odd number of pixels is cropped, libraries differ in the side that loses one more.
    shifted = (found.roll(shift, (1, 2)) for shift in product((0, -1, 1), repeat=2))
    off = min(float(((expected - each) * std * 255)[:, 1:-1, 1:-1].abs().max()) for each in shifted)
    if off > _TOLERATED:
        raise ValueError(
            f"{type(processor).__name__} prepares pictures in a way that agglo does not know: pixels are off by up to "
            f"{off:.1f} of 255"
        )
