"""Pictures of groups: the photo with every group washed in its mean colour, and one thin line between groups.

    with agglo.trace(model) as t:
        model(x)
    agglo.draw(t, pictures).save("groups.png")

Patches that belong to no group any more, because a method dropped them, are greyed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
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
_SMALL = 64  # pixels: pictures with shorter sides are enlarged to visible squares, others smoothly


def draw(
    trace: Trace,
    pictures: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    scale: int = 2,
) -> Image:
    """One row per image of the latest pass: the picture, then its groups after each reduction.

    pictures: (B, 3, H, W) as the model saw them, before normalisation: floats in 0 to 1, or uint8.
    grid: (rows, columns) of patches; None infers them from the shape of the pictures.
    names: what to write above each row.
    scale: how many times larger to draw.

    >>> import timm
    >>> model = agglo.apply(timm.create_model("test_vit"), keep_rate=0.5, blocks=(2,))
    >>> pictures = torch.rand(1, 3, 160, 160)
    >>> with agglo.trace(model) as trace:
    ...     _ = model(pictures)
    >>> sheet = agglo.draw(trace, pictures)  # a PIL image: sheet.save("groups.png")
    """
    return compose(rows(trace, pictures, grid=grid, names=names, scale=scale))


def rows(
    trace: Trace,
    pictures: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    scale: int = 2,
) -> list[Row]:
    """What `draw` draws, before it is laid out: to put more on one sheet."""
    pixels = as_pixels(pictures)
    if names is not None and len(names) != len(pixels):
        raise ValueError(f"{len(names)} names do not fit {len(pixels)} pictures")
    result = []
    for index, (picture, maps) in enumerate(zip(pixels, stages_of(trace, pixels, grid), strict=True)):
        n_patches = f": {tokens(next(iter(maps.values())).size)}" if maps else ""
        panels = [Panel(enlarged(picture, scale), f"input{n_patches}")]
        for block, labels in maps.items():
            title = f"block {block}: {tokens(count_groups(labels))}"
            panels.append(Panel(draw_groups(picture, labels, scale=scale), title))
        result.append(Row(panels, "" if names is None else names[index]))
    return result


def stages_of(trace: Trace, pixels: Pixels, grid: tuple[int, int] | None = None) -> list[dict[int, Ints]]:
    """For each picture of (B, H, W, 3), by block: the group of every patch after it, (h, w); see `patch_labels`."""
    found = patch_labels(trace)
    for labels in found.values():
        if len(labels) != len(pixels):
            raise ValueError(f"{len(pixels)} pictures do not fit a trace of {len(labels)} images")
    return [
        {block: _on_grid(labels[index], grid, picture) for block, labels in found.items()}
        for index, picture in enumerate(pixels)
    ]


def count_groups(labels: Ints) -> int:
    """How many groups there are, without what was dropped."""
    return len(np.unique(labels[labels != DROPPED]))


def _on_grid(labels: Ints, grid: tuple[int, int] | None, picture: Pixels) -> Ints:
    grid = grid_of(len(labels), picture.shape[:2]) if grid is None else grid
    if grid[0] * grid[1] != len(labels):
        raise ValueError(f"grid={grid} does not hold the {len(labels)} patches of the trace")
    return labels.reshape(grid)


def tokens(count: int) -> str:
    """In words."""
    return f"{count} token" if count == 1 else f"{count} tokens"


def patch_labels(trace: Trace) -> dict[int, Ints]:
    """By block: the group of every original patch after it, (B, N), named by its first member; prefix tokens left out.

    >>> # patches 0 and 2 together, 1 alone, 3 dropped: [0, 1, 0, -1]
    """
    return {block: first_members(grouping.labels[:, grouping.prefix :]) for block, grouping in trace.groupings.items()}


def first_members(labels: Tensor) -> Ints:
    """Labels (B, N) renamed: every group by the lowest index of its members; dropped patches stay -1."""
    named = np.empty(labels.shape, dtype=np.int64)
    for target, row in zip(named, labels.cpu().numpy(), strict=True):
        _, first, inverse = np.unique(row, return_index=True, return_inverse=True)
        target[:] = np.where(row < 0, DROPPED, first[inverse])
    return named


def grid_of(n_patches: int, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of square patches that fill a picture of (height, width).

    >>> grid_of(180, (160, 288))
    (10, 18)
    """
    height, width = shape[0], shape[1]
    n_rows = round((n_patches * height / width) ** 0.5)
    if n_rows < 1 or n_patches % n_rows or height * (n_patches // n_rows) != width * n_rows:
        raise ValueError(f"{n_patches} patches are no grid of squares in a picture of {height}x{width}; give grid=")
    return n_rows, n_patches // n_rows


def draw_groups(
    picture: Pixels, labels: Ints, *, scale: int = 2, wash: float = WASH, thickness: int | None = None
) -> Pixels:
    """Groups (h, w) drawn over a picture (H, W, 3): (H * scale, W * scale, 3).

    wash: how much of a group's mean colour covers the photo, from 0, nothing, to 1, all.
    thickness: of the light line on each side of a border, in pixels of the result; 0 draws none, None is a
        thirty-second of a patch, at least 1. A dark hairline of one pixel runs beside it, so that it shows on light
        ground too.
    """
    large = enlarged(picture, scale)
    of_pixels = stretch(labels, large.shape[:2])
    drawn = np.where((of_pixels == DROPPED)[..., None], greyed(large), _mixed(large, fill(large, labels), wash))
    if thickness is None:
        thickness = max(1, large.shape[0] // labels.shape[0] // 32)
    if thickness == 0:
        return drawn
    line = border(of_pixels, thickness)
    hairline = border(of_pixels, thickness + 1) & ~line
    drawn[hairline] = _mixed(drawn[hairline], 0, _HAIRLINE)
    drawn[line] = _mixed(drawn[line], 255, _LINE)
    return drawn


def _mixed(under: Pixels, over: Pixels | int, share: float) -> Pixels:
    return ((1 - share) * under + share * np.asarray(over)).round().astype(np.uint8)


def fill(picture: Pixels, labels: Ints) -> Pixels:
    """Every pixel of a picture (H, W, 3) replaced by the mean colour of its group, labels (h, w)."""
    names, of_patches = np.unique(labels, return_inverse=True)
    groups = stretch(of_patches.reshape(labels.shape), picture.shape[:2]).reshape(-1)
    sizes = np.bincount(groups, minlength=len(names)).clip(min=1)  # patches may be smaller than pixels
    means = [np.bincount(groups, picture[..., channel].reshape(-1), len(names)) / sizes for channel in range(3)]
    return np.stack(means, axis=-1).round().astype(np.uint8)[groups].reshape(picture.shape)


def greyed(picture: Pixels) -> Pixels:
    """A picture (H, W, 3) without colour and most of its contrast: what was there can still be made out."""
    lightness = picture.mean(axis=-1, keepdims=True)
    return np.broadcast_to(0.4 * lightness + 0.6 * 128, picture.shape).round().astype(np.uint8)


def stretch(labels: Ints, shape: Sequence[int]) -> Ints:
    """Labels (h, w) of patches as labels of the (H, W) pixels they cover."""
    row_of, column_of = (np.arange(pixels) * cells // pixels for pixels, cells in zip(shape, labels.shape, strict=True))
    return labels[row_of[:, None], column_of]


def border(labels: Ints, thickness: int) -> NDArray[np.bool_]:
    """Where labels (H, W) differ from any within `thickness` pixels, diagonals included; a picture's rim is none."""
    # Somebody around is another if the least and the greatest around are two; rows first, then columns.
    least = greatest = labels
    for axis in range(2):
        least = _around(least, thickness, axis, np.minimum)
        greatest = _around(greatest, thickness, axis, np.maximum)
    return least != greatest


def _around(labels: Ints, reach: int, axis: int, take: Callable[[Ints, Ints], Ints]) -> Ints:
    """The least or greatest of the labels (H, W) up to `reach` places before and after each, along one axis."""
    widths = [(0, 0), (0, 0)]
    widths[axis] = (reach, reach)
    padded = np.pad(labels, widths, mode="edge")
    length, places = labels.shape[axis], range(2 * reach + 1)
    shifted = [padded[shift : shift + length] if axis == 0 else padded[:, shift : shift + length] for shift in places]
    return reduce(take, shifted)


def as_pixels(pictures: Tensor) -> Pixels:
    """Pictures (B, 3, H, W) as pixels (B, H, W, 3)."""
    if pictures.dim() != 4 or pictures.shape[1] != 3:
        raise ValueError(f"pictures must be (B, 3, H, W), got {tuple(pictures.shape)}")
    if pictures.is_floating_point():
        if pictures.numel() and not (pictures.min() >= 0 and pictures.max() <= 1):
            raise ValueError("pictures must be between 0 and 1: undo the normalisation first")
        pictures = pictures.float().mul(255).round()
    return pictures.permute(0, 2, 3, 1).cpu().numpy().astype(np.uint8)


def enlarged(picture: Pixels, scale: int) -> Pixels:
    """A picture (H, W, 3) so many times larger; pixels of a small one stay visible as squares."""
    from PIL import Image

    if scale == 1:
        return picture
    height, width = picture.shape[:2]
    way = Image.Resampling.NEAREST if min(height, width) < _SMALL else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(picture).resize((width * scale, height * scale), way))
