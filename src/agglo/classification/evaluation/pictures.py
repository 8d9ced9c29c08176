"""Photographs and their groups under several reductions of one model, on one sheet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agglo.classification.data.transforms import Normalise, evaluation_transform, inputs_for
from agglo.drawing.groups import rows
from agglo.drawing.sheet import Row, compose
from agglo.experiments.checkpoints import Checkpoint, load_method, split_method
from agglo.experiments.files import require_output
from agglo.experiments.models import ModelSpec, build
from agglo.experiments.variants import Variant
from agglo.patching import remove, trace

if TYPE_CHECKING:
    from PIL.Image import Image


def visualize(spec: ModelSpec, images: Sequence[Path], variants: Sequence[Variant], *, scale: int = 2) -> Image:
    """A sheet with one row for every image and variant: the crop the model saw, then its groups after each stage."""
    opened = [open_image(path) for path in images]
    checkpoint = None if spec.checkpoint is None else Checkpoint.read(spec.checkpoint)
    model = build(spec, checkpoint)
    learned = None if checkpoint is None else checkpoint.method
    wanted = inputs_for(model)
    prepare = evaluation_transform(wanted, normalise=False)
    # Pixels stay bytes until they are normalised, as in an evaluation: the model sees the same numbers.
    pixels = torch.stack([torch.as_tensor(prepare(image)) for image in opened])
    inputs = Normalise(wanted.mean, wanted.std)(pixels)
    return draw_variants(model, inputs, pixels.expand(-1, 3, -1, -1), variants, scale=scale, learned=learned)


def draw_variants(
    model: Any,
    inputs: Tensor,
    pictures: Tensor,
    variants: Sequence[Variant],
    *,
    scale: int = 2,
    learned: Mapping[str, Tensor] | None = None,
) -> Image:
    """The sheet for a model that is built already.

    inputs: (B, C, H, W). pictures: (B, 3, H, W), the same before they were normalised, as bytes or as floats in 0 to 1.
    learned: weights of the methods that learn; without them such a method is drawn untrained, with a warning.
    """
    by_variant: list[list[Row]] = []
    for variant in variants:
        variant.apply(model)
        _load_learned(model, variant, learned)
        with torch.inference_mode(), trace(model) as record:
            model(inputs)
        names = [_row_name(variant, variants)] * len(inputs)
        by_variant.append(rows(record, pictures, grid=model.patch_embed.grid_size, names=names, scale=scale))
    remove(model)
    return compose([of_variant[index] for index in range(len(inputs)) for of_variant in by_variant])


def _load_learned(model: Any, variant: Variant, learned: Mapping[str, Tensor] | None) -> None:
    if not split_method(model.state_dict())[1]:
        return
    if learned:
        load_method(model, learned, "the checkpoint")
    else:
        warnings.warn(
            f"{variant.name} learns what to keep, and there are no weights of it: what is drawn is chance; "
            "give a checkpoint that was fine-tuned with it",
            stacklevel=1,
        )


def _row_name(variant: Variant, variants: Sequence[Variant]) -> str:
    """The variant's name, with its budget where that is not the same in every row."""
    alike = len({other.budget_text for other in variants}) == 1
    return variant.name if alike else f"{variant.name}, {variant.budget_text}"


def open_image(path: Path) -> Image:
    """An image file as RGB, the right way up. (Data sets are read as they are stored, as the study reads them.)"""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_file():
        raise ValueError(f"image={str(path)!r} is not a file")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"image={str(path)!r} cannot be read as an image: {error}") from error


def require_image_name(path: Path) -> Path:
    """The path itself, if a picture can be written there; called before any work is done."""
    from PIL import Image

    writable = sorted(
        suffix for suffix, kind in Image.registered_extensions().items() if kind in ("PNG", "JPEG", "WEBP")
    )
    if path.suffix.lower() not in writable:
        raise ValueError(f"output={str(path)!r} is no image file; accepted: {', '.join(writable)}")
    return require_output(path)
