"""A colour photograph and its groups, without any model: patches compared by their colours alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agglo.clustering import cut, linkage
from agglo.drawing.groups import Pixels, draw_groups, enlarged, first_members
from agglo.drawing.sheet import Panel, Row, compose
from agglo.lab.data.image_files import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

GROUPS = (400, 100, 25)
_LONG_SIDE = 448  # pixels that are looked at
_PATCH = 8


def draw_photo(path: Path, *, scale: int = 1) -> Image:
    """Draw the photo, then cuts of one tree over its patches, in one row."""
    image = shrunk(open_image(path))
    features = patch_colours(image)
    tree = linkage(features, "complete", metric="euclidean")
    grid = tuple(side // _PATCH for side in image.shape[:2])
    panels = [Panel(enlarged(image, scale), f"{len(features)} patches")]
    for count in GROUPS:
        if count < len(features):
            labels = first_members(cut(tree, count)[None])[0].reshape(grid)
            # Patches this small leave no room for lines between them.
            panels.append(Panel(draw_groups(image, labels, scale=scale, wash=1, thickness=0), f"{count} groups"))
    about = f"{path.name}: patches of {_PATCH} pixels, compared by their colours alone (complete linkage, no model)"
    return compose([Row(panels, about)])


def shrunk(photo: Image) -> Pixels:
    """Return a photo as pixels (H, W, 3) of whole patches, shrunk to a size to look at; the rest is cut off."""
    factor = _LONG_SIDE / max(photo.size)
    width, height = (max(_PATCH, round(side * factor) // _PATCH * _PATCH) for side in photo.size)
    if min(photo.size) * factor < _PATCH:
        raise ValueError(f"a photo of {photo.width}x{photo.height} pixels is too long and narrow to draw groups on")
    return np.asarray(photo.resize((round(photo.width * factor), round(photo.height * factor))))[:height, :width]


def patch_colours(image: Pixels) -> Tensor:
    """Return mean and deviation of red, green and blue in every patch of an image (H, W, 3): (N, 6), in 0 to 1."""
    rows, columns = (side // _PATCH for side in image.shape[:2])
    patches = torch.from_numpy(image.copy()).float().div(255).view(rows, _PATCH, columns, _PATCH, 3)
    pixels = patches.permute(0, 2, 1, 3, 4).reshape(rows * columns, _PATCH * _PATCH, 3)
    return torch.cat([pixels.mean(dim=1), pixels.std(dim=1, correction=0)], dim=1)
