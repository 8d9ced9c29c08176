"""A model of transformers for another image size, its position embeddings resampled by its own function."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def resized(model: Any, image_size: tuple[int, int]) -> nn.Module:
    """A model of the same weights that takes squares of another size; ValueError where that cannot be had."""
    if image_size[0] != image_size[1]:
        raise ValueError(f"image_size={image_size}: models of transformers take squares")
    side, config = image_size[0], deepcopy(model.config)
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", None)
    if patch is None or not hasattr(vision, "image_size"):
        raise ValueError(f"{type(model).__name__} has no image size that could be set to {side}")
    if side % (patch if isinstance(patch, int) else patch[0]):
        raise ValueError(f"image_size={image_size} must be multiples of the patch size {patch}")
    vision.image_size = side
    other: nn.Module = type(model)(config)
    state, wanted = dict(model.state_dict()), other.state_dict()
    for name, value in wanted.items():
        if value.shape != state[name].shape:
            blank = torch.zeros(1, *value.shape[-2:])  # of which only the shape counts
            state[name] = _embeddings(model, name).interpolate_pos_encoding(blank, side, side).reshape(value.shape)
    other.load_state_dict(state)
    return other


def _embeddings(model: nn.Module, name: str) -> Any:
    """The module around a position table that can resample it."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if hasattr(module, "interpolate_pos_encoding"):
            return module
    raise ValueError(f"{type(model).__name__} cannot resample {name} for another image size")
