"""What `agglo.tune` returns, its report and its chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.tuned import read
from agglo.tuning.objectives import TITLES
from agglo.tuning.settings import Target
from agglo.tuning.statistics import SURE, Drop, Quality
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import Column, Table

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
    def front(self) -> list[dict[str, Any]]:
        """The points that were followed along the front, of every method."""
        return list(self.content["front"])

    def report(self) -> str:
        """Return what was chosen, what it is worth, and what the images can show of it."""
        content, data, settings = self.content, self.content["data"], self.content["settings"]
        head = (
            f"{content['model']['name']}: {Target(**content['target'])}\n"
            f"measured on {_device(content)}, {settings['device']}, {settings['dtype']}, batch {data['batch_size']}; "
            f"searched on {data['search']} images, confirmed on {data['confirmation']} others"
        )
        notes = [f"{content['seconds']:.0f} seconds", *content["notes"]]
        notes += [f"left out: {reason}" for reason in content["left_out"]]
        if busy := load_warning(content["machine"]):
            notes.append(busy)
        arguments = [repr(self.config.method), *(f"{name}={value!r}" for name, value in _plain(self.config).items())]
        if settings["tower"] is not None:
            arguments.append(f"tower={settings['tower']!r}")
        call = f"agglo.apply(model, {', '.join(arguments)})"
        return "\n\n".join([head, _chosen(content), promise(content), _table(content), "\n".join(notes), call])

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw each method's front and the chosen point, as measured on the images to search on; needs matplotlib.

        Args:
            path: A file, whose ending decides the format (.png, .svg, .pdf).
        """
        from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves

        content, settings, data = self.content, self.content["settings"], self.content["data"]
        rows, by_time = content["front"], Target(**content["target"]).by_time
        has_labels = Quality(**content["chosen"]["search"]).drop is not None

        def gain(row: Row) -> float:
            return float(row["speed"]["median"] if by_time else 1 / row["gflops"])

        def height(row: Row) -> tuple[float, float]:
            """Return the height of a point, with its standard error."""
            quality = Quality(**row["search"])
            drop = quality.drop
            # A logarithmic scale has no zero.
            return (max(quality.distance, 1e-9), quality.distance_error) if drop is None else (drop.points, drop.error)

        def curve(name: str, rows: Sequence[Row], *, ringed: bool = False) -> Curve:
            heights, errors = zip(*map(height, rows), strict=True)
            ranges = [(row["speed"]["low"], row["speed"]["high"]) for row in rows] if by_time else None
            return Curve(name, [gain(row) for row in rows], heights, errors, ranges, ringed=ringed)

        curves = []
        for method in dict.fromkeys(row["method"] for row in rows):
            curves.append(curve(method, sorted((row for row in rows if row["method"] == method), key=gain)))
        curves.append(curve("chosen", [content["chosen"]], ringed=True))
        x_title = "times as fast as dense" if by_time else "times fewer GFLOPs than dense"
        y_title = "points of accuracy lost" if has_labels else TITLES.get(settings["objective"], settings["objective"])
        dense = Level(0.0, x=1.0) if has_labels else None
        measured = f"{_device(content)}, {settings['dtype']}, batch {data['batch_size']}"
        title = f"{content['model']['name']}: {Target(**content['target'])}\n{measured}"
        note = f"bars: standard error of {data['search']} images"
        panel = CurvePanel(curves, x_title, y_title, dense, y_log=not has_labels)
        draw_curves([panel], Path(path), title=title, note=note)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file, which `Tuned.load` and `agglo.apply(model, tuned=path)` read."""
        write_json(Path(path), self.content)


def _device(content: Row) -> str:
    machine = content["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {content['settings']['threads']} threads"


def _chosen(content: Row) -> str:
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
        lines.append(f"accuracy lost: {unseen.drop} points of {accuracy:.2f} (paired, {unseen.images} images)")
    if unseen.disagreement is not None:
        lines.append(f"decisions that are not the dense model's: {unseen.disagreement} of 100")
    return "\n".join(lines)


def promise(content: Row) -> str:
    """Return whether the target is kept, missed, or cannot be shown to be either with these images."""
    target, chosen = Target(**content["target"]), content["chosen"]
    if target.kind == "gflops":
        return f"kept: {chosen['gflops']:.3f} of the dense GFLOPs, {target.value:g} was asked for"
    if target.kind == "speedup":
        reached = chosen["speed"]["median"]
        verdict = "kept" if reached >= target.value else "missed"
        return f"{verdict}: {reached:.2f} times as fast on this machine, {target.value:g} was asked for"
    quality = Quality(**chosen["confirmation"])
    verdict = {True: "kept", False: "missed", None: "not shown"}[quality.loss.within(target.value)]
    what = "accuracy" if quality.drop else "decisions, of which accuracy can lose no more than that"
    return (
        f"{verdict}: at most {target.value:g} points of {what}; {quality.loss} are lost on the {quality.images} images "
        f"that the search did not see, and the verdict is by {SURE:g} standard errors"
    )


def _table(content: Row) -> str:
    confirmed = Quality(**content["chosen"]["confirmation"])
    columns = [Column("method", left=True), Column("x dense", ".2f"), Column("GFLOPs", ".3f")]
    columns.append(Column(content["settings"]["objective"], ".4g"))
    columns += [Column("changed")] * (confirmed.disagreement is not None) + [Column("lost")] * bool(confirmed.drop)
    rows: list[list[Any]] = []
    for row in (content["chosen"], *content["beside"]):
        quality = Quality(**row["confirmation"])
        drops = [str(drop) for drop in (quality.disagreement, quality.drop) if drop is not None]
        rows.append([_described(row), row["speed"]["median"], row["gflops"], quality.distance, *drops])
    title = "every method at its own best schedule, on the images the search did not see:"
    return f"{title}\n{Table(columns, rows).text()}"


def _described(row: Row) -> str:
    """Return a method, its options and its schedule, to be read."""
    config = ReductionConfig.from_dict(row["config"])
    arguments = _plain(config)
    schedule = arguments.pop("schedule", None)
    options = ", ".join(f"{name} {value}" for name, value in arguments.items())
    return " ".join(filter(None, (config.method, options and f"({options})", schedule)))


def _plain(config: ReductionConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in ("version", "method")}
