"""The front as a picture: how far outputs are from the dense model's, and what that loses, against what was asked for:
speed, or GFLOPs, which no other process on the machine disturbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves
from agglo.tuning.objectives import TITLES
from agglo.tuning.report import target_of
from agglo.tuning.statistics import Quality, pareto, quality_from

Value = Callable[[Quality], tuple[float, float]]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Each method's own front, and the point that was chosen, all on the images that were searched on."""
    objective = content["settings"]["objective"]
    panels = [_panel(content, _distance, TITLES.get(objective, objective), log=True)]
    quality = quality_from(content["chosen"]["search"])
    if quality.drop is not None:
        panels.append(_panel(content, _lost, "points of accuracy lost"))
    elif quality.disagreement is not None:
        panels.append(_panel(content, _changed, "decisions changed (%)"))
    machine, settings, data = (content[part] for part in ("machine", "settings", "data"))
    where = machine["gpu"] or f"{machine['cpu']}, {settings['threads']} threads"
    title = (
        f"{content['model']['name']}: {target_of(content)}\n{where}, {settings['dtype']}, batch {data['batch_size']}"
    )
    turns = ", and half of the turns" if target_of(content).by_time else ""
    note = f"bars: standard error of {data['search']} images{turns}; each method at its own best schedule"
    draw_curves(panels, path, title=title, note=note)


def _panel(content: Mapping[str, Any], value: Value, title: str, *, log: bool = False) -> CurvePanel:
    """log: on a logarithmic scale, which has no place for the dense model at zero."""
    points = content["front"]
    by_time = target_of(content).by_time
    gain = _speed if by_time else _saving
    curves = []
    for method in dict.fromkeys(point["method"] for point in points):
        own = [point for point in points if point["method"] == method]
        curves.append(_curve(method, pareto(own, gain=gain, loss=_total), value, by_time))
    curves.append(replace(_curve("chosen", [content["chosen"]], value, by_time), ringed=True))
    label = "times as fast as dense" if by_time else "times fewer GFLOPs than dense"
    return CurvePanel(curves, label, title, None if log else Level(0.0, x=1.0), y_log=log)


def _curve(name: str, points: list[Mapping[str, Any]], value: Value, by_time: bool) -> Curve:
    found = [value(quality_from(point["search"])) for point in points]
    heights, errors = [y for y, _ in found], [error for _, error in found]
    if not by_time:
        return Curve(name, list(map(_saving, points)), heights, errors)
    ranges = [(point["speed"]["low"], point["speed"]["high"]) for point in points]
    return Curve(name, list(map(_speed, points)), heights, errors, ranges)


def _speed(point: Mapping[str, Any]) -> float:
    return float(point["speed"]["median"])


def _saving(point: Mapping[str, Any]) -> float:
    return 1 / float(point["gflops"])


def _total(point: Mapping[str, Any]) -> float:
    return quality_from(point["search"]).distance


def _distance(quality: Quality) -> tuple[float, float]:
    return max(quality.distance, 1e-9), quality.distance_error  # a logarithmic scale has no zero


def _lost(quality: Quality) -> tuple[float, float]:
    assert quality.drop is not None
    return quality.drop.points, quality.drop.error


def _changed(quality: Quality) -> tuple[float, float]:
    assert quality.disagreement is not None
    return quality.disagreement.points, quality.disagreement.error
