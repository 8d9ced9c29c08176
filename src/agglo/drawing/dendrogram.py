"""A tree of merges as an SVG picture: leaves at the bottom, merges above, and a line where it is cut.

It has no colours of its own but the leaves': lines take the colour of the text around it, so that it fits light and
dark pages. Leaves carry `data-leaf`, the number of their token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 800.0, 240.0
_LEAF = 12.0  # height of a leaf's coloured foot
_ROOM = 6.0  # above the highest merge


@dataclass(frozen=True)
class Arch:
    """One merge: from the left child to the right one, each from its own height up to the merge's."""

    left: float
    right: float
    left_height: float
    right_height: float
    height: float


def leaf_order(merges: Floats) -> list[int]:
    """The leaves from left to right so that no arches cross: those of a merge's first child, then its second's.

    >>> leaf_order(np.array([[0, 2, 0.1, 2], [1, 3, 0.5, 3]]))
    [1, 0, 2]
    """
    n_leaves = len(merges) + 1
    order, waiting = [], [n_leaves + len(merges) - 1]
    while waiting:
        node = waiting.pop()
        if node < n_leaves:
            order.append(node)
        else:
            first, second = (int(child) for child in merges[node - n_leaves, :2])
            waiting += [second, first]
    return order


def arches(merges: Floats) -> list[Arch]:
    """Every merge of a tree (N - 1, 4) in SciPy's layout, with leaves at 0, 1, 2, ... in `leaf_order`."""
    n_leaves = len(merges) + 1
    place, height = np.zeros(n_leaves + len(merges)), np.zeros(n_leaves + len(merges))
    place[leaf_order(merges)] = np.arange(n_leaves)
    found = []
    for number, (first, second, distance, _) in enumerate(merges):
        one, other = int(first), int(second)
        found.append(Arch(place[one], place[other], height[one], height[other], float(distance)))
        place[n_leaves + number] = (place[one] + place[other]) / 2
        height[n_leaves + number] = distance
    return found


def cut_height(merges: Floats, groups: int) -> float:
    """Between the last merge that makes so many groups and the first that would make fewer."""
    done = len(merges) + 1 - groups
    below = merges[done - 1, 2] if done > 0 else 0.0
    above = merges[done, 2] if done < len(merges) else below * 1.05
    return float((below + above) / 2)


def dendrogram(merges: Floats, groups: int, colours: Sequence[str], title: str) -> str:
    """The SVG. groups: how many the cut leaves. colours: of each leaf, as CSS has them. title: read to those who cannot
    see it.

    Heights are drawn as square roots: most merges lie near the ground, and all of them count.
    """
    n_leaves = len(merges) + 1
    tall = max(float(merges[-1, 2]) if len(merges) else 0.0, 1e-12)
    step, floor = WIDTH / n_leaves, HEIGHT - _LEAF

    def across(place: float) -> str:
        return f"{(place + 0.5) * step:.1f}"

    def up(height: float) -> str:
        return f"{floor - (max(height, 0.0) / tall) ** 0.5 * (floor - _ROOM):.1f}"

    paths: dict[bool, list[str]] = {True: [], False: []}
    for number, arch in enumerate(arches(merges)):
        path = f"M{across(arch.left)} {up(arch.left_height)}V{up(arch.height)}H{across(arch.right)}"
        paths[number < n_leaves - groups].append(f"{path}V{up(arch.right_height)}")
    feet = [
        f'<rect data-leaf="{leaf}" x="{place * step:.2f}" y="{floor:.1f}" width="{step:.2f}" height="{_LEAF:.1f}" '
        f'fill="{colours[leaf]}"/>'
        for place, leaf in enumerate(leaf_order(merges))
    ]
    line = up(cut_height(merges, groups))
    return (
        f'<svg class="dendrogram" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{title}" data-groups="{groups}"><path class="above" d="{"".join(paths[False])}"/>'
        f'<path class="below" d="{"".join(paths[True])}"/>{"".join(feet)}'
        f'<line class="cut" x1="0" x2="{WIDTH:.0f}" y1="{line}" y2="{line}"/></svg>'
    )
