"""Curves with points that can be clicked, as an SVG picture: each point carries `data-point`, its number.

Lines and letters take the colour of the text around it, so that it fits light and dark pages; a method has its one
colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from agglo.drawing.colours import in_order, looks

WIDTH, HEIGHT = 720.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 14.0, 46.0
_TICKS = 5


@dataclass(frozen=True)
class Dot:
    """method: whose curve it is on. note: read out, and shown over it. ringed: pointed out."""

    method: str
    x: float
    y: float
    y_error: float
    note: str
    ringed: bool = False


@dataclass(frozen=True)
class Axis:
    """A scale over some numbers, with room around them, and round numbers to write beside it."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers on it.

        >>> Axis(0.9, 2.1).ticks()
        [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
        """
        rough = (self.high - self.low) / _TICKS
        unit = 10 ** floor(log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.75)
        first = floor(self.low / step) + 1
        return [round(number * step, 12) for number in range(first, floor(self.high / step + 1e-9) + 1)]


def scatter(
    dots: Sequence[Dot],
    x_label: str,
    y_label: str,
    title: str,
    *,
    chosen: int | None = None,
    level: float | None = None,
) -> str:
    """The SVG. chosen: the number of the point that is lit. level: the height of the dense model, for a dashed line."""
    across = Axis.over([dot.x for dot in dots])
    heights = [dot.y + sign * dot.y_error for dot in dots for sign in (-1, 1)]
    up = Axis.over(heights if level is None else [*heights, level])

    def x(value: float) -> str:
        return f"{_LEFT + across.at(value) * (WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{HEIGHT - _BOTTOM - up.at(value) * (HEIGHT - _TOP - _BOTTOM):.1f}"

    names = in_order(dot.method for dot in dots)
    colours = {name: look.colour for name, look in looks(names).items()}
    parts = []
    for tick in across.ticks():
        parts.append(f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in up.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick)}" dy="0.35em" text-anchor="end">{tick:g}</text>')
    middle = (WIDTH + _LEFT - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f"translate(14 {(HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)"
    parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(y_label)}</text>')
    if level is not None:
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(level)}" y2="{y(level)}"/>')
        parts.append(f'<text x="{WIDTH - _RIGHT}" y="{y(level)}" dy="-0.4em" text-anchor="end">dense</text>')
    for name in names:
        own = sorted((dot for dot in dots if dot.method == name), key=lambda dot: dot.x)
        path = "L".join(f"{x(dot.x)} {y(dot.y)}" for dot in own)
        parts.append(f'<path class="curve" d="M{path}" stroke="{colours[name]}"/>')
    for number, dot in enumerate(dots):
        lit = " lit" if number == chosen else ""
        bar = f'<line x1="{x(dot.x)}" x2="{x(dot.x)}" y1="{y(dot.y - dot.y_error)}" y2="{y(dot.y + dot.y_error)}" '
        ring = f'<circle class="ring" cx="{x(dot.x)}" cy="{y(dot.y)}" r="11"/>' if dot.ringed else ""
        parts.append(
            f'<g class="point{lit}" data-point="{number}" tabindex="0" role="button" aria-label="{escape(dot.note)}">'
            f"<title>{escape(dot.note)}</title>{ring}{bar}"
            f'stroke="{colours[dot.method]}"/><circle class="target" cx="{x(dot.x)}" cy="{y(dot.y)}" r="14"/>'
            f'<circle class="dot" cx="{x(dot.x)}" cy="{y(dot.y)}" r="6" fill="{colours[dot.method]}"/></g>'
        )
    legend = "".join(f'<span><i style="background:{colours[name]}"></i>{escape(name)}</span>' for name in names)
    return (
        f'<div class="scatter"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="group" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg><p class="legend">{legend}</p></div>'
    )
