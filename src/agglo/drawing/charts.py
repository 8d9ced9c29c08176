"""Charts: curves with the error of their points, bars with their range.

Every method has one colour and one marker on every chart; related methods have related colours.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DENSE, SLICED, FREE = "dense", "sliced dense", "free"
GRID, FAINT, INK = "#e8e8e8", "#c9c9c9", "#444444"
_RANGE = {"fmt": "none", "ecolor": INK, "elinewidth": 1, "capsize": 2}
_RING: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 12, "fillstyle": "none", "color": INK}
_TITLE: dict[str, Any] = {"fontsize": 10, "color": INK}


@dataclass(frozen=True)
class Look:
    """A colour, a marker and a line style, by matplotlib's names."""

    colour: str
    marker: str = "o"
    line: str = "-"


LOOKS: dict[str, Look] = {
    DENSE: Look("#8a8a8a", "o", "--"),
    SLICED: Look("#b3b3b3", "o", "--"),
    FREE: Look("#dcdcdc", "o"),
    # hard merging
    "atc": Look("#2f6fb0", "D"),
    "atc single": Look("#86bbe8", "o"),
    "atc average": Look("#2f6fb0", "D"),
    "atc complete": Look("#143c69", "^"),
    "tome": Look("#e8862e", "s"),
    "kmedoids": Look("#1b9e77", "v"),
    "dpc_knn": Look("#7d4fb0", "P"),
    "dpc_knn equal": Look("#b79ad6", "P"),
    "pool": Look("#2fb3cf", "X"),
    "pitome": Look("#b0582f", "^"),
    "tofu": Look("#f0b27a", "v"),
    "mctf": Look("#8a5a00", "P"),
    "mutual": Look("#5b9aa0", "D"),
    "diffrate": Look("#4a6fa5", "X"),
    "diffrate_learned": Look("#22406b", "X"),
    "dtem": Look("#6c8f3c", "o"),
    "dct": Look("#9aa5b1", "v"),
    # soft merging
    "sit": Look("#9c2763", "o"),
    "patch_merger": Look("#d0478f", "s"),
    "sinkhorn": Look("#ec9ac4", "D"),
    # pruning
    "topk": Look("#c2362b", "o"),
    "evit": Look("#e8705f", "s"),
    "ats": Look("#7a1a12", "D"),
    "dynamicvit": Look("#f2a89c", "^"),
    "dynamicvit_prsv": Look("#a86458", "v"),
    "random": Look("#a58a6b", "P"),
    # pruning in a fixed pattern
    "l1": Look("#d9c84a", "o"),
    "l2": Look("#a8951f", "s"),
    "linf": Look("#6b5d0e", "D"),
    # tokens that skip blocks
    "svit": Look("#8cc152", "o"),
    "evovit": Look("#3f7d1f", "s"),
}
_FURTHER = ("#5c6bc0", "#00897b", "#c158dc", "#6d8a96", "#ef5777", "#3c40c6", "#b33939", "#218c74")
_MARKERS = "o^DsvPX"
_LINES = ("-", "--", ":", "-.")
_KNOWN = re.compile(rf"({'|'.join(sorted(LOOKS, key=len, reverse=True))})(?!\w)")


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for every name of one chart.

    A name may go on after its method's: "tome, linear" and "kmedoids(weights='equal')" look like tome and kmedoids, and
    where a chart has several of one method, each further one has another line style. Methods that are not ours get
    colours of their own, in the order they come.

    >>> looks(["tome, linear", "tome"])["tome"].colour == LOOKS["tome"].colour
    True
    """
    names = list(dict.fromkeys(names))
    found = {name: LOOKS[name] for name in names if name in LOOKS}
    times: Counter[str | None] = Counter(found.keys())
    for name in names:
        if name in found:
            continue
        method = method_of(name)
        if method is not None:
            found[name] = replace(LOOKS[method], line=_LINES[times[method] % len(_LINES)])
        else:
            number = times[None]
            marker, line = _MARKERS[number % len(_MARKERS)], _LINES[number // len(_FURTHER) % len(_LINES)]
            found[name] = Look(_FURTHER[number % len(_FURTHER)], marker, line)
        times[method] += 1
    return found


def method_of(name: str) -> str | None:
    """Return the known method that a name begins with; None if there is none.

    >>> method_of("atc average, linear"), method_of("l1:option=value"), method_of("l1norm"), method_of("mine")
    ('atc average', 'l1', None, None)
    """
    found = _KNOWN.match(name)
    return None if found is None else found[1]


def in_order(names: Iterable[str]) -> list[str]:
    """Return every name once, in the order of LOOKS, so that all charts have one order; other methods come last."""
    order = {method: number for number, method in enumerate(LOOKS)}
    return sorted(dict.fromkeys(names), key=lambda name: order.get(method_of(name) or "", len(order)))


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    y_error: Sequence[float] | None = None  # standard error of each y
    x_range: Sequence[tuple[float, float]] | None = None  # the least and the most of each x
    faint: bool = False  # drawn grey and without a name
    ringed: bool = False  # drawn as rings around points that other curves have, to point them out


@dataclass(frozen=True)
class DenseLine:
    """The height of the dense model, and its point on it where the x axis has one."""

    y: float
    y_error: float | None = None
    x: float | None = None
    x_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class CurvePanel:
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    level: DenseLine | None = None
    title: str = ""
    x_ticks: Sequence[float] | None = None
    from_zero: bool = False  # of the x axis
    y_limits: tuple[float, float] | None = None  # None shows all
    y_log: bool = False
    x_log: bool = False  # to the base of two


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    low: float  # ends of the range of values, or of the standard error around the value
    high: float
    note: str = ""  # written at its end
    label: str = ""  # written beside the axis in place of the name


@dataclass(frozen=True)
class BarPanel:
    """Horizontal bars from top to bottom, in groups that stand a little apart."""

    groups: Sequence[Sequence[Bar]]
    x_label: str
    title: str = ""


def draw_curves(
    panels: Sequence[CurvePanel],
    path: Path,
    *,
    title: str = "",
    note: str = "",
    share_y: bool = False,
    columns: int | None = None,
) -> None:
    """Draw panels, `columns` in a row (None: all), with one legend on their right; `note` stands below them."""
    from matplotlib.ticker import LogLocator

    curves = [curve for panel in panels for curve in panel.curves if not (curve.faint or curve.ringed)]
    names = in_order(curve.name for curve in curves)
    chosen = looks(names)
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    figure, axes = _figure(rows, columns, (5.2 * columns, max(4.2 * rows, 1.4 + 0.21 * len(names))), share_y=share_y)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw_level(ax, panel)
        for curve in panel.curves:
            if curve.faint:
                ax.plot(curve.x, curve.y, color=FAINT, linewidth=0.9, zorder=1, label="other methods")
            elif curve.ringed:
                ax.plot(curve.x, curve.y, zorder=4, label=curve.name, **_RING)
            else:
                how = {"elinewidth": 0.8, "zorder": 3, "label": curve.name, **_styled(chosen[curve.name])}
                ax.errorbar(curve.x, curve.y, curve.y_error, _whiskers(curve.x, curve.x_range), **how)
        ax.set_xlabel(panel.x_label)
        ax.set_title(panel.title, **_TITLE)
        if not share_y or ax is axes.flat[0]:
            ax.set_ylabel(panel.y_label)
        if panel.x_log:
            ax.set_xscale("log", base=2)
        if panel.x_ticks is not None:
            ax.set_xticks(panel.x_ticks, [f"{tick:g}" for tick in panel.x_ticks])
        if panel.from_zero:
            ax.set_xlim(left=0)
        if panel.y_limits is not None:
            ax.set_ylim(*panel.y_limits)
        if panel.y_log:
            # Plain numbers at 1, 2 and 5 of every power of ten.
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:,.10g}")
            ax.yaxis.set_minor_formatter("")
            ax.tick_params(axis="y", which="minor", color=FAINT)
    # On the right, with every name once, whichever panels it is in.
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    names = in_order(handles)
    labels = [textwrap.fill(name, 30) for name in names]
    place = {"loc": "outside right center", "fontsize": 9, "labelcolor": INK}
    figure.legend([handles[name] for name in names], labels, frameon=False, **place)
    _finish(figure, path, title, note)


def draw_bars(panels: Sequence[Sequence[BarPanel]], path: Path, *, title: str = "", note: str = "") -> None:
    """Draw rows of panels of horizontal bars."""
    most = [max(sum(map(len, panel.groups)) + 0.6 * len(panel.groups) for panel in row) for row in panels]
    size = (8 if len(panels[0]) == 1 else 5 * len(panels[0]), 0.9 + sum(0.34 * count + 0.6 for count in most))
    figure, axes = _figure(len(panels), len(panels[0]), size, heights=most)
    for ax, panel in zip(axes.flat, (panel for row in panels for panel in row), strict=True):
        bars = [(bar, number) for number, group in enumerate(panel.groups) for bar in group]
        positions = [index + 0.6 * number for index, (_, number) in enumerate(bars)]
        chosen = looks(bar.name for bar, _ in bars)
        ax.barh(positions, [b.value for b, _ in bars], height=0.78, color=[chosen[b.name].colour for b, _ in bars])
        for position, (bar, _) in zip(positions, bars, strict=True):
            if bar.high > bar.low:
                ax.errorbar([bar.value], [position], xerr=_whiskers([bar.value], [(bar.low, bar.high)]), **_RANGE)
            end = (bar.high, position)
            ax.annotate(bar.note, end, (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
        ax.set_yticks(positions, [bar.label or bar.name for bar, _ in bars])
        ax.grid(visible=False, axis="y")
        room = 1.2 if any(bar.note for bar, _ in bars) else 1.04
        ax.set_xlim(0, room * max(bar.high for bar, _ in bars))
        ax.set_ylim(positions[-1] + 0.7, -0.7)
        ax.set_xlabel(panel.x_label)
        ax.set_title(panel.title, **_TITLE)
    _finish(figure, path, title, note)


def _styled(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.line, "markersize": 5, "linewidth": 1.4}


def _figure(
    rows: int, columns: int, size: tuple[float, float], *, share_y: bool = False, heights: Sequence[float] = ()
) -> tuple[Any, Any]:
    """Return a figure and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y, height_ratios=heights or None)
    for ax in axes.flat:
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(FAINT)
        ax.tick_params(color=FAINT, labelcolor=INK, labelsize=9)
        ax.xaxis.label.set_color(INK)
        ax.yaxis.label.set_color(INK)
    return figure, axes


def _draw_level(ax: Any, panel: CurvePanel) -> None:
    level = panel.level
    if level is None:
        return
    colour = LOOKS[DENSE].colour
    ax.axhline(level.y, color=colour, linestyle="--", linewidth=1.1, zorder=2, label=DENSE)
    if level.y_error:
        ax.axhspan(level.y - level.y_error, level.y + level.y_error, color=colour, alpha=0.13, linewidth=0, zorder=0)
    if level.x is not None:
        whiskers = _whiskers([level.x], None if level.x_range is None else [level.x_range])
        ax.errorbar([level.x], [level.y], xerr=whiskers, elinewidth=0.8, zorder=3, **_styled(LOOKS[DENSE]))


def _whiskers(
    values: Sequence[float], ranges: Sequence[tuple[float, float]] | None
) -> tuple[list[float], list[float]] | None:
    if ranges is None:
        return None
    pairs = list(zip(values, ranges, strict=True))
    return [value - low for value, (low, _) in pairs], [high - value for value, (_, high) in pairs]


def _finish(figure: Any, path: Path, title: str, note: str) -> None:
    if title:
        figure.suptitle(title, fontsize=9, x=0.01, ha="left", color=INK)
    if note:
        letters = int(16 * figure.get_figwidth())  # that fit at 8 points
        figure.supxlabel(textwrap.fill(note, letters), fontsize=8, x=0.01, ha="left", color="#777777")
    figure.savefig(path, dpi=150)
