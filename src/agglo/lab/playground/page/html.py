"""Results as HTML. Images are part of the text, as data URLs: nothing is written to disk, and no path is named.

Templates escape whatever they are given: names of models, classes and files stay text.
"""

from __future__ import annotations

import base64
import io
import re
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import floor, log10
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from agglo.drawing.colours import in_order, looks
from agglo.drawing.groups import Ints, Pixels, count_groups, draw_groups, enlarged, fill, grid_of, tokens
from agglo.hosts.common.swap import UnsupportedModelError
from agglo.lab.drawing.detections import draw_detections, draw_groups_under, draw_over_one_another
from agglo.lab.playground.detection import Detected, Found
from agglo.lab.playground.fronts import AXES, Front
from agglo.lab.playground.tokens import Compared, Tree

_SIDE, _DETECTION_SIDE = 224, 336  # pixels that an image has at least
_LARGE = 60_000  # bytes of a PNG
# Not in "1/2" or "http://", but in "hf:/home/anna/vit".
_PATH = re.compile(r"(?<![\w/.])(?:[A-Za-z]:\\|/(?!/))[^\s'\",;:)]*[/\\][^\s'\",;:)]*")


def asset(name: str) -> str:
    """Return the text of a file of JavaScript or CSS in this folder."""
    return files("agglo.lab.playground.page").joinpath(name).read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    return _templates().get_template(f"{template}.html").render(values)


@cache
def _templates() -> Environment:
    loader = PackageLoader("agglo.lab.playground.page", "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    found.globals |= {
        "data_url": data_url,
        "enlarge": lambda pixels: enlarged(pixels, _scale(pixels)),
        "count_groups": count_groups,
        "token_count": lambda labels: tokens(count_groups(labels)),
        "draw_groups": _draw_groups,
        "draw_objects": _draw_objects,
        "draw_both": _draw_both,
    }
    return found


def data_url(pixels: Pixels) -> str:
    """Return an image (H, W, 3) as PNG, exact, or as WebP where that would be large: photographs."""
    from PIL import Image

    image, file, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    image.save(file, "PNG", compress_level=1)  # quick to make rather than small
    if file.tell() > _LARGE:
        file, kind = io.BytesIO(), "webp"
        image.save(file, "WEBP", quality=88, method=1)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _scale(pixels: Pixels, side: int = _SIDE) -> int:
    """Return how many times larger a small image is shown."""
    return max(1, side // min(pixels.shape[:2]))


def _draw_groups(pixels: Pixels, labels: Ints, spans: tuple[float, float] | None, scale: int | None) -> Pixels:
    scale = scale or _scale(pixels)
    if spans is None:
        return draw_groups(pixels, labels.astype(np.int64), scale=scale)
    return draw_groups_under(pixels, labels, spans, scale)


def _draw_objects(found: Detected, one: Found, scale: int) -> Any:
    present = sorted({int(label) for each in found.passes for label in each.objects["labels"]})
    return draw_detections(found.pixels, one.objects, found.classes, scale=scale, least=0.0, present=present)


def _draw_both(found: Detected, colours: dict[str, Any], scale: int) -> Pixels:
    assert found.reduced is not None
    layers = [(found.dense.objects, colours["dense"]), (found.reduced.objects, colours["reduced"])]
    return draw_over_one_another(found.pixels, layers, scale=scale)


def compared_html(found: Compared) -> str:
    """Return the result of the Tokens tab."""
    return render("tokens", found=found, tree=None if found.tree is None else Dendrogram(found.tree, found.pixels))


def detected_html(found: Detected) -> str:
    """Return the result of the Detection tab."""
    return render("detection", found=found, scale=_scale(found.pixels, _DETECTION_SIDE))


def curve_html(front: Front, axis: str, chosen: int | None) -> str:
    """Return the curve of the Tune tab, with a point lit."""
    colours = {name: look.colour for name, look in looks(in_order(p.method for p in front.points)).items()}
    plot = Plot(front, axis)
    return render("curve", front=front, axis=axis, x_label=AXES[axis], chosen=chosen, plot=plot, colours=colours)


def error_html(error: BaseException) -> str:
    """Return what a visitor reads when something cannot be done."""
    return render("error", sentence=sentence(error))


def sentence(error: BaseException) -> str:
    """Return an error in words for a visitor, without paths of the server.

    What nobody foresaw goes to the terminal, where its details belong.
    """
    if isinstance(error, ModuleNotFoundError):
        return f"This needs {error.name}, which is not installed here; pip install 'agglo[web]' brings all of it."
    if isinstance(error, (ValueError, UnsupportedModelError)):
        return _PATH.sub("…", " ".join(str(error).split()))
    traceback.print_exception(error)
    return "Something went wrong here; the window in which agglo play runs says more."


class Dendrogram:
    """A tree of merges as `templates/tokens.html` draws it: leaves at the bottom, and a line where it is cut.

    Heights are drawn as square roots: most merges lie near the ground, and all of them count.

    Attributes:
        below, above: Paths of the merges below and above the cut.
        leaves: Every leaf with its left edge, from left to right.
        step: Width of a leaf.
        cut: Where the tree is cut.
        colours: Mean colours of the patches, the leaves.
    """

    width, height, floor, top = 800.0, 240.0, 228.0, 6.0  # the coloured feet of the leaves lie below the floor

    def __init__(self, tree: Tree, pixels: Pixels) -> None:
        merges = tree.merges.numpy()
        n_leaves = len(merges) + 1
        self.step, order = self.width / n_leaves, leaf_order(merges)
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
        self.leaves = [(leaf, position * self.step) for position, leaf in enumerate(order)]
        self.cut = self._y(cut_height(merges, tree.groups))
        grid = grid_of(n_leaves, pixels.shape[:2])
        filled = fill(pixels, np.arange(n_leaves).reshape(grid))
        patches = filled[:: pixels.shape[0] // grid[0], :: pixels.shape[1] // grid[1]].reshape(-1, 3).tolist()
        self.colours = ["#{:02x}{:02x}{:02x}".format(*patch) for patch in patches]
        self.title = (
            f"{tree.linkage} linkage over {n_leaves} tokens at block {tree.block}, cut into {tree.groups} groups"
        )

    def _y(self, height: float) -> float:
        return round(float(self.floor - (max(height, 0.0) / self._highest) ** 0.5 * (self.floor - self.top)), 1)


def leaf_order(merges: NDArray[np.float64]) -> list[int]:
    """Return the leaves from left to right so that no lines cross.

    >>> leaf_order(np.array([[0, 2, 0.1, 2], [1, 3, 0.5, 3]]))
    [1, 0, 2]
    """
    members = [[leaf] for leaf in range(len(merges) + 1)]
    for first, second, *_ in merges:
        members.append(members[int(first)] + members[int(second)])
    return members[-1]


def cut_height(merges: NDArray[np.float64], groups: int) -> float:
    """Return a height between the last merge that leaves so many groups and the first that leaves fewer."""
    done = len(merges) + 1 - groups
    below = merges[done - 1, 2] if done > 0 else 0.0
    above = merges[done, 2] if done < len(merges) else below * 1.05
    return float((below + above) / 2)


class Plot:
    """Coordinates of `templates/curve.html`. Gradio's own plots tell no clicks on a point, nor take keys."""

    width, height = 720, 380
    left, right, top, bottom = 64, 704, 14, 334

    def __init__(self, front: Front, axis: str) -> None:
        heights = [y + sign * error for y, error in map(front.y, front.points) for sign in (-1, 1)]
        level = [] if front.accuracy is None else [front.accuracy]
        self._x_range = _with_room([point.x(axis) for point in front.points])
        self._y_range = _with_room([*heights, *level])
        self.x_ticks, self.y_ticks = ticks(*self._x_range), ticks(*self._y_range)

    def x(self, value: float) -> float:
        low, high = self._x_range
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        low, high = self._y_range
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)


def _with_room(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two others.

    >>> ticks(0.9, 2.1)
    [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    """
    rough = (high - low) / 5
    unit = 10 ** floor(log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.75)
    return [round(number * step, 12) for number in range(floor(low / step) + 1, floor(high / step + 1e-9) + 1)]
