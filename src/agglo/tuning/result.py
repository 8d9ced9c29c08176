"""What `agglo.tune` returns, its report and its chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.tuned import read
from agglo.tuning.objectives import TITLES
from agglo.tuning.settings import Target
from agglo.tuning.statistics import SURE, Drop, Quality, pareto
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import Column, Table

_KEPT, _MISSED, _OPEN = "kept", "missed", "not shown"
Row = Mapping[str, Any]


class Tuned:
    """A config that `agglo.tune` found, with everything that was measured.

    Attributes:
        config: What `agglo.apply(model, tuned.config)` takes.
        content: All that was measured, as the JSON file holds it (docs/tune.md describes it).

    >>> from agglo.tuning import Tuned
    >>> tuned = Tuned.load("deit_tiny_patch16_224-half")
    >>> tuned.config.method, f"{tuned.gflops:.2f} of the dense model's GFLOPs"
    ('atc', "0.50 of the dense model's GFLOPs")
    >>> import timm
    >>> model = agglo.apply(timm.create_model("deit_tiny_patch16_224"), tuned.config)
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        if content["config"] is None:
            raise ValueError("this search was stopped before it found anything; the same call or command continues it")
        self.content = dict(content)
        self.config = ReductionConfig.from_dict(content["config"])

    @classmethod
    def load(cls, source: str | PathLike[str]) -> Tuned:
        """Read a result from its file, or a ready-made one by its name."""
        return cls(read(source))

    def __repr__(self) -> str:
        return f"Tuned({str(self.config)!r})"

    @property
    def speedup(self) -> float:
        """Times as fast as the dense model, measured in turns with it: the median."""
        return float(self.content["chosen"]["speed"]["median"])

    @property
    def gflops(self) -> float:
        """Multiply-adds as a fraction of the dense model's."""
        return float(self.content["chosen"]["gflops"])

    @property
    def quality(self) -> Quality:
        """Distance to the dense outputs, on the images that the search did not see."""
        return Quality(**self.content["chosen"]["confirmation"])

    @property
    def drop(self) -> Drop | None:
        """Accuracy lost on those images, with its standard error; None without labels."""
        return self.quality.drop

    @property
    def points(self) -> list[dict[str, Any]]:
        """Every evaluation: its config, its batches, and sums over their images. Ready-made results keep none."""
        steps = [step for step in self.content.get("steps", ()) if step["kind"] == "quality"]
        return [{**step["key"], **step["found"]} for step in steps]

    @property
    def front(self) -> list[dict[str, Any]]:
        """The points that were followed along the front, of every method."""
        return list(self.content["front"])

    def report(self) -> str:
        """Return what was chosen, what it is worth, and what the images can show of it."""
        return _report(self.content)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the front into a file, by its ending (.png, .svg, .pdf); needs matplotlib."""
        _plot(self.content, Path(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file, which `Tuned.load` and `agglo.apply(model, tuned=path)` read."""
        write_json(Path(path), self.content)


def _report(content: Mapping[str, Any]) -> str:
    data, settings, machine = (content[part] for part in ("data", "settings", "machine"))
    target = Target(**content["target"])
    head = (
        f"{content['model']['name']}: {target}\n"
        f"measured on {_device(content)}, {settings['device']}, {settings['dtype']}, batch {data['batch_size']}; "
        f"searched on {data['search']} images, confirmed on {data['confirmation']} others"
    )
    notes = [_work(content), *content["notes"], *(f"left out: {reason}" for reason in content["left_out"])]
    if busy := load_warning(machine):
        notes.append(busy)
    config = ReductionConfig.from_dict(content["config"])
    arguments = [repr(config.method), *(f"{name}={value!r}" for name, value in _plain(config).items())]
    if settings["tower"] is not None:
        arguments.append(f"tower={settings['tower']!r}")
    call = f"agglo.apply(model, {', '.join(arguments)})"
    return "\n\n".join([head, _chosen(content), promise(content), _table(content), "\n".join(notes), call])


def _device(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {content['settings']['threads']} threads"


def _chosen(content: Mapping[str, Any]) -> str:
    chosen = content["chosen"]
    seen, unseen = Quality(**chosen["search"]), Quality(**chosen["confirmation"])
    tokens = " ".join(str(count) for count, _ in groupby([content["dense"]["tokens"], *chosen["counts"]]))
    speed = chosen["speed"]
    lines = [
        f"chosen: {_described(chosen)}",
        f"patch tokens: {tokens}; {chosen['gflops']:.3f} of the dense model's GFLOPs",
        f"speed: {speed['median']:.2f} times dense, in turns with it (half of {speed['turns']} turns between "
        f"{speed['low']:.2f} and {speed['high']:.2f})",
        f"{content['settings']['objective']} to the dense output: {unseen.distance:.4g} +- {unseen.distance_error:.2g} "
        f"on images the search did not see, {seen.distance:.4g} on those it saw",
    ]
    if unseen.drop is not None:
        accuracy = content["dense"]["accuracy"]
        lines.append(f"accuracy lost: {unseen.drop} of {accuracy:.2f} (paired, {unseen.images} images)")
    if unseen.disagreement is not None:
        lines.append(f"decisions that are not the dense model's: {unseen.disagreement} of 100")
    return "\n".join(lines)


def promise(content: Mapping[str, Any]) -> str:
    """Return whether the target is kept, missed, or cannot be shown to be either with these images."""
    target, chosen = Target(**content["target"]), content["chosen"]
    if target.kind == "gflops":
        return f"{_KEPT}: {chosen['gflops']:.3f} of the dense GFLOPs, {target.value:g} was asked for"
    if target.kind == "speedup":
        reached = chosen["speed"]["median"]
        word = _KEPT if reached >= target.value else _MISSED
        return f"{word}: {reached:.2f} times as fast on this machine, {target.value:g} was asked for"
    quality, most = Quality(**chosen["confirmation"]), target.value
    found = quality.loss
    what = "accuracy" if quality.drop else "decisions, of which accuracy can lose no more than that"
    verdict = found.within(most)
    if verdict:
        bound = f"{found.points:.2f} + {SURE:g} x {found.error:.2f}"
        return f"{_KEPT}: at most {most:g} points of {what}: {bound} is below it"
    if verdict is False:
        return f"{_MISSED}: {found} of {what} are lost on images the search did not see, {most:g} was asked for"
    left_open = f"at most {most:g} points of {what}: {found} on {found.images} images leaves it open"
    return f"{_OPEN}: {left_open}; {_needed(found, most)}"


def _needed(found: Drop, most: float) -> str:
    needed = found.images_needed(most)
    if needed is None:
        return "more of it than that was lost on these images: ask for less, or search on more images"
    return f"about {needed} images to confirm with would show it, if it stays at that"


def _table(content: Mapping[str, Any]) -> str:
    columns = [Column("method", left=True), Column("x dense", ".2f"), Column("GFLOPs", ".3f")]
    columns.append(Column(content["settings"]["objective"], ".4g"))
    confirmed = Quality(**content["chosen"]["confirmation"])
    columns += [Column("changed")] * (confirmed.disagreement is not None) + [Column("lost")] * (
        confirmed.drop is not None
    )
    rows: list[list[Any]] = []
    for row in (content["chosen"], *content["beside"]):
        quality = Quality(**row["confirmation"])
        drops = [drop for drop in (quality.disagreement, quality.drop) if drop is not None]
        cells = [_described(row), row["speed"]["median"], row["gflops"], quality.distance]
        rows.append([*cells, *(f"{drop.points:.2f} +- {drop.error:.2f}" for drop in drops)])
    title = "every method at its own best schedule, on the images the search did not see:"
    return f"{title}\n{Table(columns, rows).text()}"


def _described(row: Mapping[str, Any]) -> str:
    """Return a method, its options and its schedule, to be read."""
    config = ReductionConfig.from_dict(row["config"])
    arguments = _plain(config)
    schedule = arguments.pop("schedule", None)
    options = ", ".join(f"{name} {value}" for name, value in arguments.items())
    return " ".join(filter(None, (config.method, options and f"({options})", schedule)))


def _plain(config: ReductionConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in ("version", "method")}


def _work(content: Mapping[str, Any]) -> str:
    took = f"{content['seconds']:.0f} seconds"
    if "steps" not in content:
        return took
    qualities = [step for step in content["steps"] if step["kind"] == "quality"]
    cannot = sum(step["kind"] == "cannot" for step in content["steps"])
    tried = len({str(step["key"]["config"]) for step in qualities})
    apart = f", {cannot} more cannot do what was asked for" if cannot else ""
    return f"tried: {tried} configs in {len(qualities)} evaluations{apart}; {took}"


def _plot(content: Mapping[str, Any], path: Path) -> None:
    """Draw each method's front, and the point that was chosen, as measured on the images to search on."""
    from agglo.drawing.charts import draw_curves

    settings, data, target = content["settings"], content["data"], Target(**content["target"])
    objective, quality = settings["objective"], Quality(**content["chosen"]["search"])
    panels = [_panel(content, _distance, TITLES.get(objective, objective), log=True)]
    if quality.drop is not None:
        panels.append(_panel(content, lambda q: _points(q.drop), "points of accuracy lost"))
    elif quality.disagreement is not None:
        panels.append(_panel(content, lambda q: _points(q.disagreement), "decisions changed (%)"))
    measured = f"{_device(content)}, {settings['dtype']}, batch {data['batch_size']}"
    turns = ", and half of the turns" if target.by_time else ""
    note = f"bars: standard error of {data['search']} images{turns}; each method at its own best schedule"
    draw_curves(panels, path, title=f"{content['model']['name']}: {target}\n{measured}", note=note)


def _panel(
    content: Mapping[str, Any], value: Callable[[Quality], tuple[float, float]], title: str, *, log: bool = False
) -> Any:
    """Return a panel of the chart. value: The height of a point, with its standard error."""
    from agglo.drawing.charts import Curve, CurvePanel, Level

    rows: Sequence[Row] = content["front"]
    by_time = Target(**content["target"]).by_time

    def gain(row: Row) -> float:
        return float(row["speed"]["median"] if by_time else 1 / row["gflops"])

    def curve(name: str, rows: Sequence[Row], *, ringed: bool = False) -> Curve:
        heights, errors = zip(*(value(Quality(**row["search"])) for row in rows), strict=True)
        ranges = [(row["speed"]["low"], row["speed"]["high"]) for row in rows] if by_time else None
        return Curve(name, [gain(row) for row in rows], heights, errors, ranges, ringed=ringed)

    curves = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        curves.append(curve(method, pareto(own, gain=gain, loss=lambda row: Quality(**row["search"]).distance)))
    curves.append(curve("chosen", [content["chosen"]], ringed=True))
    label = "times as fast as dense" if by_time else "times fewer GFLOPs than dense"
    # A logarithmic scale has no place for the dense model at zero.
    return CurvePanel(curves, label, title, None if log else Level(0.0, x=1.0), y_log=log)


def _distance(quality: Quality) -> tuple[float, float]:
    return max(quality.distance, 1e-9), quality.distance_error  # a logarithmic scale has no zero


def _points(drop: Drop | None) -> tuple[float, float]:
    assert drop is not None
    return drop.points, drop.error
