"""Draw groups: the photo with every group washed in its mean colour, and one thin line between groups.

    with agglo.trace(model) as t:
        model(x)
    agglo.draw(t, images).save("groups.png")

Patches that belong to no group any more, because a method dropped them, are greyed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agglo.drawing.sheet import Panel, Row, compose
from agglo.tracing import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]

DROPPED = -1  # the label of patches that belong to no group any more

# How much of the mean colour lies over the photo, and of the lines over both: what is in a group can still be made out.
WASH, _LINE, _HAIRLINE = 0.65, 0.9, 0.45
_SMALL = 64  # pixels: images with shorter sides are enlarged to visible squares, others smoothly


def draw(
    trace: Trace,
    images: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    scale: int = 2,
) -> Image:
    """Draw one row per image of the latest pass: the image, then its groups after each reduction.

    Args:
        trace: What the pass recorded.
        images: (B, 3, H, W) as the model saw them, before normalisation: floats in 0 to 1, or uint8.
        grid: (rows, columns) of patches; None infers them from the shape of the images.
        names: What to write above each row.
        scale: How many times larger to draw.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5, blocks=(2,))
    >>> images = torch.rand(1, 3, 160, 160)
    >>> with agglo.trace(model) as trace:
    ...     _ = model(images)
    >>> sheet = agglo.draw(trace, images)  # sheet.save("groups.png") writes it
    """
    pixels = as_pixels(images)
    if names is not None and len(names) != len(pixels):
        raise ValueError(f"{len(names)} names do not fit {len(pixels)} images")
    rows = []
    for index, (image, maps) in enumerate(zip(pixels, stages_of(trace, pixels, grid), strict=True)):
        n_patches = f": {tokens(next(iter(maps.values())).size)}" if maps else ""
        panels = [Panel(enlarged(image, scale), f"input{n_patches}")]
        for block, labels in maps.items():
            title = f"block {block}: {tokens(count_groups(labels))}"
            panels.append(Panel(draw_groups(image, labels, scale=scale), title))
        rows.append(Row(panels, "" if names is None else names[index]))
    return compose(rows)


def stages_of(trace: Trace, pixels: Pixels, grid: tuple[int, int] | None = None) -> list[dict[int, Ints]]:
    """Return the group of every patch (h, w) after each block, for each image of (B, H, W, 3); see `patch_labels`."""
    found = patch_labels(trace)
    for labels in found.values():
        if len(labels) != len(pixels):
            raise ValueError(f"{len(pixels)} images do not fit a trace of {len(labels)} images")
        rows, columns = grid or grid_of(labels.shape[1], pixels.shape[1:3])
        if rows * columns != labels.shape[1]:
            raise ValueError(f"grid={grid} does not hold the {labels.shape[1]} patches of the trace")
    return [
        {block: labels[index].reshape(rows, columns) for block, labels in found.items()} for index in range(len(pixels))
    ]


def count_groups(labels: Ints) -> int:
    """Return the number of groups, without what was dropped."""
    return len(np.unique(labels[labels != DROPPED]))


def tokens(count: int) -> str:
    """Return a label such as "24 tokens"."""
    return f"{count} token" if count == 1 else f"{count} tokens"


def patch_labels(trace: Trace) -> dict[int, Ints]:
    """Return by block the group of every original patch after it, (B, N), without prefix tokens.

    A group is named by its first member. Patches 0 and 2 together, 1 alone and 3 dropped are [0, 1, 0, -1].
    """
    return {block: first_members(grouping.labels[:, grouping.prefix :]) for block, grouping in trace.groupings.items()}


def first_members(labels: Tensor) -> Ints:
    """Return labels (B, N) with every group named by the lowest index of its members; dropped patches stay -1."""
    named = np.empty(labels.shape, dtype=np.int64)
    for target, row in zip(named, labels.cpu().numpy(), strict=True):
        _, first, inverse = np.unique(row, return_index=True, return_inverse=True)
        target[:] = np.where(row < 0, DROPPED, first[inverse])
    return named


def grid_of(n_patches: int, shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of square patches that fill an image of (height, width).

    >>> grid_of(180, (160, 288))
    (10, 18)
    """
    height, width = shape[0], shape[1]
    n_rows = round((n_patches * height / width) ** 0.5)
    if n_rows < 1 or n_patches % n_rows or height * (n_patches // n_rows) != width * n_rows:
        raise ValueError(f"{n_patches} patches are no grid of squares in an image of {height}x{width}; give grid=")
    return n_rows, n_patches // n_rows


def draw_groups(
    image: Pixels,
    labels: Ints,
    *,
    scale: int = 2,
    wash: float = WASH,
    thickness: int | None = None,
    spans: tuple[float, float] | None = None,
) -> Pixels:
    """Draw groups (h, w) over an image (H, W, 3); returns (H * scale, W * scale, 3).

    Args:
        wash: How much of a group's mean colour covers the photo, from 0, nothing, to 1, all.
        thickness: Of the light line on each side of a border, in pixels of the result; 0 draws none, None is a
            thirty-second of a patch, at least 1. A dark hairline of one pixel runs next to it, so that it shows on
            light ground too.
        spans: How many patches (down, across) cover the image itself, if a padded grid reaches beyond it: (50, 66.7)
            of 50 x 68. None is all of them.
    """
    large = enlarged(image, scale)
    of_pixels = stretch(labels, large.shape[:2], spans)
    drawn = np.where((of_pixels == DROPPED)[..., None], greyed(large), _mixed(large, fill(large, of_pixels), wash))
    if thickness is None:
        thickness = max(1, int(large.shape[0] / (spans or labels.shape)[0] / 32))
    if thickness == 0:
        return drawn
    line = border(of_pixels, thickness)
    hairline = border(of_pixels, thickness + 1) & ~line
    drawn[hairline] = _mixed(drawn[hairline], 0, _HAIRLINE)
    drawn[line] = _mixed(drawn[line], 255, _LINE)
    return drawn


def _mixed(under: Pixels, over: Pixels | int, weight: float) -> Pixels:
    return ((1 - weight) * under + weight * np.asarray(over)).round().astype(np.uint8)


def fill(image: Pixels, labels: Ints) -> Pixels:
    """Replace every pixel of an image (H, W, 3) by the mean colour of its group, labels (h, w)."""
    groups = np.unique(stretch(labels, image.shape[:2]), return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(groups)
    means = [np.bincount(groups, image[..., channel].reshape(-1)) / sizes for channel in range(3)]
    return np.stack(means, axis=-1).round().astype(np.uint8)[groups].reshape(image.shape)


def greyed(image: Pixels) -> Pixels:
    """Return an image (H, W, 3) without colour and most of its contrast: what was there can still be made out."""
    lightness = image.mean(axis=-1, keepdims=True)
    return np.broadcast_to(0.4 * lightness + 0.6 * 128, image.shape).round().astype(np.uint8)


def stretch(labels: Ints, shape: Sequence[int], spans: tuple[float, float] | None = None) -> Ints:
    """Return labels (h, w) of patches as labels of the (H, W) pixels whose centres they cover. See `draw_groups`."""
    row_of, column_of = (
        ((np.arange(pixels) + 0.5) * cells / pixels).astype(int)
        for pixels, cells in zip(shape, spans or labels.shape, strict=True)
    )
    return labels[row_of[:, None], column_of]


def border(labels: Ints, thickness: int) -> NDArray[np.bool_]:
    """Return where labels (H, W) differ from any within `thickness` pixels, diagonals included; the rim is none."""
    height, width = labels.shape
    padded = np.pad(labels, thickness, mode="edge")
    found = np.zeros(labels.shape, dtype=bool)
    for down, across in product(range(2 * thickness + 1), repeat=2):
        found |= padded[down : down + height, across : across + width] != labels
    return found


def as_pixels(images: Tensor) -> Pixels:
    """Return images (B, 3, H, W) as pixels (B, H, W, 3)."""
    if images.dim() != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be (B, 3, H, W), got {tuple(images.shape)}")
    if images.is_floating_point():
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            raise ValueError("images must be between 0 and 1: undo the normalisation first")
        images = images.float().mul(255).round()
    return images.permute(0, 2, 3, 1).cpu().numpy().astype(np.uint8)


def enlarged(image: Pixels, scale: int) -> Pixels:
    """Return an image (H, W, 3) so many times larger; pixels of a small one stay visible as squares."""
    from PIL import Image

    if scale == 1:
        return image
    height, width = image.shape[:2]
    way = Image.Resampling.NEAREST if min(height, width) < _SMALL else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(image).resize((width * scale, height * scale), way))
