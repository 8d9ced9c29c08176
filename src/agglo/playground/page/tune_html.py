"""Tune as HTML."""

from __future__ import annotations

from html import escape

from agglo.drawing.scatter import scatter
from agglo.playground.fronts import AXES, Front
from agglo.playground.page.html import code, section, table


def front_html(front: Front, axis: str, point: int | None) -> str:
    """The curve, with a point lit."""
    title = f"{front.name}: {front.y_label} against {axis}; every point can be chosen"
    plot = scatter(front.dots(axis), AXES[axis], front.y_label, title, chosen=point, level=front.accuracy)
    note = (
        f"{escape(front.title)}, measured on {escape(front.where)}; bars are standard errors, the ring is the answer."
    )
    return section("tune", plot, f'<p class="hint">{note} Click a point to apply its schedule.</p>')


def point_html(front: Front, number: int, applied_to: str) -> str:
    """A point in numbers and as Python, and where it is applied now."""
    point = front.points[number]
    low, high = point.speed_range
    rows = [
        ["method", escape(point.method)],
        ["patch tokens after each block", " ".join(map(str, point.counts))],
        ["GFLOPs", f"{point.gflops:.3f} of the dense model's"],
        ["speed", f"{point.speed:.2f} times dense <small>(half of the turns: {low:.2f} to {high:.2f})</small>"],
        ["quality", escape(front.height_text(point))],
    ]
    line = front.chosen(number).line
    return section(
        "point", f'<p class="hint applied">{escape(applied_to)}</p>', table(["", ""], rows, "The point"), code([line])
    )
