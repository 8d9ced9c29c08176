"""Results as HTML. Images are part of the text, as data URLs: nothing is written to disk, and no path is named.

Templates escape whatever they are given: names of models, classes and files stay text.
"""

from __future__ import annotations

import base64
import io
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from agglo.drawing.groups import Pixels, count_groups, draw_groups, enlarged, fill, grid_of, tokens
from agglo.lab.drawing.detections import draw_detections
from agglo.lab.playground.detection import Detected, Found
from agglo.lab.playground.tokens import Tree

_LARGE = 60_000  # bytes of a PNG


def asset(name: str) -> str:
    """Return the text of a file of JavaScript or CSS in the folder `page`."""
    return files("agglo.lab.playground").joinpath("page", name).read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """Fill a template of the folder `page`."""
    return _TEMPLATES.get_template(f"{template}.html").render(values)


def data_url(pixels: Pixels) -> str:
    """Return an image (H, W, 3) as PNG, exact, or as WebP where that would be large: photographs."""
    image, file, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    image.save(file, "PNG", compress_level=1)  # quick to make rather than small
    if file.tell() > _LARGE:
        file, kind = io.BytesIO(), "webp"
        image.save(file, "WEBP", quality=88, method=1)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _draw_objects(found: Detected, one: Found, scale: int) -> Any:
    present = sorted({int(label) for each in found.passes for label in each.objects["labels"]})
    return draw_detections(found.pixels, one.objects, found.classes, scale=scale, least=0.0, present=present)


class Dendrogram:
    """A tree of merges as `page/templates/tokens.html` draws it: leaves at the bottom, and a line where it is cut.

    Heights are drawn as square roots: most merges lie near the ground, and all of them count.
    """

    width, height, floor, top = 800.0, 240.0, 228.0, 6.0  # the coloured feet of the leaves lie below the floor

    def __init__(self, tree: Tree, pixels: Pixels) -> None:
        merges = tree.merges.numpy()
        n_leaves = len(merges) + 1
        self.step = self.width / n_leaves
        members = [[leaf] for leaf in range(n_leaves)]
        for first, second, *_ in merges:
            members.append(members[int(first)] + members[int(second)])
        order = members[-1]  # of the leaves from left to right, so that no lines cross
        self._highest = max([merge[2] for merge in merges], default=0.0) or 1.0
        x, y = np.zeros(n_leaves + len(merges)), np.full(n_leaves + len(merges), self.floor)
        x[order] = (np.arange(n_leaves) + 0.5) * self.step
        paths = []
        for node, (first, second, height, _) in enumerate(merges, start=n_leaves):
            left, right = int(first), int(second)
            x[node], y[node] = (x[left] + x[right]) / 2, self._y(height)
            paths.append(f"M{x[left]:.1f} {y[left]}V{y[node]}H{x[right]:.1f}V{y[right]}")
        done = n_leaves - tree.groups
        self.below, self.above = "".join(paths[:done]), "".join(paths[done:])
        # Every leaf with its left edge, from left to right.
        self.leaves = [(leaf, position * self.step) for position, leaf in enumerate(order)]
        # Between the last merge that is done and the first that is not.
        heights = [0.0, *merges[:, 2], merges[-1, 2] * 1.05]
        self.cut = self._y((heights[done] + heights[done + 1]) / 2)
        grid = grid_of(n_leaves, pixels.shape[:2])
        filled = fill(pixels, np.arange(n_leaves).reshape(grid))
        patches = filled[:: pixels.shape[0] // grid[0], :: pixels.shape[1] // grid[1]].reshape(-1, 3).tolist()
        self.colours = ["#{:02x}{:02x}{:02x}".format(*patch) for patch in patches]
        where = f"{n_leaves} tokens at block {tree.block}"
        self.title = f"{tree.linkage} linkage over {where}, cut into {tree.groups} groups"

    def _y(self, height: float) -> float:
        return round(float(self.floor - (max(height, 0.0) / self._highest) ** 0.5 * (self.floor - self.top)), 1)


_LOADER = PackageLoader("agglo.lab.playground", "page/templates")
_TEMPLATES = Environment(loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
_TEMPLATES.globals |= {
    "data_url": data_url,
    "enlarged": enlarged,
    "scale_of": lambda pixels, side=224: max(1, side // min(pixels.shape[:2])),  # for sides of this many pixels
    "count_groups": count_groups,
    "token_count": lambda labels: tokens(count_groups(labels)),
    "draw_groups": draw_groups,
    "draw_objects": _draw_objects,
    "dendrogram": Dendrogram,
}
