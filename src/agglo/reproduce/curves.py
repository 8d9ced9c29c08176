"""Accuracy against how many tokens stay, one panel per model and data set, as the paper draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.reproduce.compare import Value, grouped, over_seeds
from agglo.reproduce.item import Result

_DENSE = "dense"
_MOST = 4  # panels in a row: the data sets of the paper


def _ends(y: float, error: float) -> list[float]:
    return [y - error, y + error]


def accuracy_panels(
    results: Sequence[Result],
    path: Path,
    *,
    against: str = "keep_rate",
    x_label: str = "keep rate at each stage",
    by: Sequence[str] = ("model", "data"),
    faint: Callable[[str], bool] = lambda name: False,
) -> list[Path]:
    """A panel for all results that agree in `by`, a curve per method, the dense model as a dashed line; faint methods
    are thin and grey. Nothing is drawn where nothing was measured."""
    panels = []
    for names, here in grouped(results, *by).items():
        metric = "mAP" if any("mAP" in result for result in here) else "top1"
        done = [result for result in here if metric in result]
        curves = []
        for (method,), of_one in grouped([r for r in done if r["method"] != _DENSE], "method").items():
            values = {x: over_seeds(at, metric) for (x,), at in grouped(of_one, against).items()}
            points = sorted((float(str(x)), value) for x, value in values.items() if isinstance(value, Value))
            errors = [value.error or 0.0 for _, value in points]
            heights = [value.number for _, value in points]
            curves.append(Curve(str(method), [x for x, _ in points], heights, errors, faint=faint(str(method))))
        dense = over_seeds([result for result in done if result["method"] == _DENSE], metric)
        level = Level(dense.number, dense.error) if isinstance(dense, Value) else None
        shown = [] if level is None else _ends(level.y, level.y_error or 0.0)
        for curve in curves:
            if not curve.faint:
                own = curve.y_error or [0.0] * len(curve.y)
                shown += [end for y, error in zip(curve.y, own, strict=True) for end in _ends(y, error)]
        if not curves or not shown:
            continue
        room = 0.06 * (max(shown) - min(shown) or 1)
        limits = (min(shown) - room, max(shown) + room)
        ticks = sorted({x for curve in curves for x in curve.x})
        title = ", ".join(str(name) for name in names)
        panels.append(
            CurvePanel(
                curves, x_label, f"{metric} (%)", level, title, ticks if len(ticks) < 8 else None, y_limits=limits
            )
        )
    if not panels:
        return []
    note = "bars and grey band: standard error of the images and of the seeds"
    draw_curves(panels, path, note=note, columns=_MOST if len(panels) > _MOST else None)
    return [path]
