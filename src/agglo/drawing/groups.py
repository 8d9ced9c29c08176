"""Pictures of groups: every group filled with its mean colour and outlined in a colour that stays its own.

    with agglo.trace(model) as t:
        model(x)
    agglo.draw(t, pictures).save("groups.png")

A group is known by its first member, the lowest patch index in it. When two groups merge, the one with the lower first
member lives on under its colour, so that a group can be followed from stage to stage. Dropped patches are greyed out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

Colour = tuple[int, int, int]

DROPPED = -1  # the label of patches that belong to no group any more

PALETTE: tuple[Colour, ...] = (
    (255, 59, 48),
    (255, 214, 10),
    (48, 209, 88),
    (10, 132, 255),
    (255, 255, 255),
    (255, 55, 165),
    (100, 220, 255),
    (255, 149, 0),
    (172, 90, 255),
    (176, 255, 64),
    (0, 215, 185),
    (255, 170, 200),
)


def draw(
    trace: Trace,
    pictures: Tensor,
    *,
    grid: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    scale: int = 2,
) -> Image:
    """One row an image of the latest pass: the picture, then its groups after each reduction.

    pictures: (B, 3, H, W) as the model saw them, before normalisation: floats in 0 to 1, or uint8.
    grid: (rows, columns) of patches; None infers them from the shape of the pictures.
    names: what to write beside each row.
    scale: how many times larger to draw.
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
    """What `draw` draws, before it is laid out: to put rows of several traces on one sheet."""
    pixels = as_pixels(pictures)
    if names is not None and len(names) != len(pixels):
        raise ValueError(f"{len(names)} names do not fit {len(pixels)} pictures")
    stages = patch_labels(trace)
    for labels in stages.values():
        if len(labels) != len(pixels):
            raise ValueError(f"{len(pixels)} pictures do not fit a trace of {len(labels)} images")
    result = []
    for index, picture in enumerate(pixels):
        maps = {block: _on_grid(labels[index], grid, picture) for block, labels in stages.items()}
        colours = colours_of(maps.values())
        n_patches = f": {_tokens(next(iter(maps.values())).size)}" if maps else ""
        panels = [Panel(_enlarged(picture, scale), f"input{n_patches}")]
        for block, labels in maps.items():
            drawn = draw_groups(picture, labels, colours, scale=scale)
            panels.append(Panel(drawn, f"block {block}: {_tokens(len(np.unique(labels[labels != DROPPED])))}"))
        result.append(Row(panels, "" if names is None else names[index]))
    return result


def _on_grid(labels: Ints, grid: tuple[int, int] | None, picture: Pixels) -> Ints:
    grid = grid_of(len(labels), picture.shape[:2]) if grid is None else grid
    if grid[0] * grid[1] != len(labels):
        raise ValueError(f"grid={grid} does not hold the {len(labels)} patches of the trace")
    return labels.reshape(grid)


def _tokens(count: int) -> str:
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


def colours_of(stages: Iterable[Ints]) -> dict[int, Colour]:
    """An outline for every group of an image, by first member; stages (h, w) are labels named that way.

    Groups that ever touch get different colours as long as the palette lasts. The last stage chooses first: its few
    groups are the ones that stay visible.
    """
    in_reverse = list(stages)[::-1]
    touching: defaultdict[int, set[int]] = defaultdict(set)
    for labels in in_reverse:
        for one, other in ((labels[1:], labels[:-1]), (labels[:, 1:], labels[:, :-1])):
            different = (one != other) & (one != DROPPED) & (other != DROPPED)
            for a, b in np.unique(np.stack([one, other], axis=-1)[different], axis=0).tolist():
                touching[a].add(b)
                touching[b].add(a)
    chosen: dict[int, int] = {}
    used: Counter[int] = Counter()
    for name in dict.fromkeys(name for labels in in_reverse for name in np.unique(labels[labels != DROPPED]).tolist()):
        around = Counter(chosen[neighbour] for neighbour in touching[name] if neighbour in chosen)
        chosen[name] = min(range(len(PALETTE)), key=lambda colour: (around[colour], used[colour]))
        used[chosen[name]] += 1
    return {name: PALETTE[colour] for name, colour in chosen.items()}


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
    picture: Pixels, labels: Ints, colours: Mapping[int, Colour], *, scale: int = 2, thickness: int | None = None
) -> Pixels:
    """Groups (h, w) drawn over a picture (H, W, 3): (H * scale, W * scale, 3).

    colours: the outline of each label.
    thickness: of the outlines, in pixels of the result; None is a tenth of a patch.
    """
    filled = _enlarged(fill(picture, labels), scale)
    enlarged_labels = stretch(labels, filled.shape[:2])
    if thickness is None:
        thickness = max(1, filled.shape[0] // labels.shape[0] // 10)
    edge = border(enlarged_labels, thickness) & (enlarged_labels != DROPPED)
    names, inverse = np.unique(enlarged_labels[edge], return_inverse=True)
    outlines = np.array([colours[name] for name in names.tolist()], dtype=np.uint8).reshape(-1, 3)
    filled[edge] = outlines[inverse]
    return filled


def fill(picture: Pixels, labels: Ints) -> Pixels:
    """Every pixel of a picture (H, W, 3) replaced by the mean colour of its group, labels (h, w), or greyed out."""
    of_pixels = stretch(labels, picture.shape[:2])
    _, groups = np.unique(of_pixels, return_inverse=True)
    groups = groups.reshape(-1)
    sizes = np.bincount(groups)
    means = [np.bincount(groups, picture[..., channel].reshape(-1)) / sizes for channel in range(3)]
    filled = np.stack(means, axis=-1).round().astype(np.uint8)[groups].reshape(picture.shape)
    return np.where((of_pixels == DROPPED)[..., None], greyed(picture), filled)


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
    reach = 2 * thickness + 1
    around = np.lib.stride_tricks.sliding_window_view(np.pad(labels, thickness, mode="edge"), (reach, reach))
    return (around != labels[..., None, None]).any(axis=(-2, -1))


def as_pixels(pictures: Tensor) -> Pixels:
    """Pictures (B, 3, H, W) as pixels (B, H, W, 3)."""
    if pictures.dim() != 4 or pictures.shape[1] != 3:
        raise ValueError(f"pictures must be (B, 3, H, W), got {tuple(pictures.shape)}")
    if pictures.is_floating_point():
        if pictures.numel() and not (pictures.min() >= 0 and pictures.max() <= 1):
            raise ValueError("pictures must be between 0 and 1: undo the normalisation first")
        pictures = pictures.float().mul(255).round()
    return pictures.permute(0, 2, 3, 1).cpu().numpy().astype(np.uint8)


def _enlarged(picture: Pixels, scale: int) -> Pixels:
    return picture.repeat(scale, axis=0).repeat(scale, axis=1)
