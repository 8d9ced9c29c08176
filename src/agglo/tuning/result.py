"""What `agglo.tune` returns, its report and its chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.tuned import read
from agglo.tuning.settings import Target
from agglo.tuning.statistics import SURE, Quality
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import Column, Table

Entry = Mapping[str, Any]  # of the JSON file: all of it, or the row of a config


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

    def report(self) -> str:
        """Return what was chosen, what it is worth, and what the images can show of it."""
        content = self.content
        data, settings, chosen = content["data"], content["settings"], content["chosen"]
        tokens = " ".join(str(count) for count, _ in groupby([content["dense"]["tokens"], *chosen["counts"]]))
        notes = [f"{content['seconds']:.0f} seconds", *content["notes"]]
        if busy := load_warning(content["machine"]):
            notes.append(busy)
        tower = "" if settings["tower"] is None else f", tower={settings['tower']!r}"
        parts = [
            f"{content['model']['name']}: {Target(**content['target'])}\n"
            f"measured on {_device(content)}, {settings['device']}, {settings['dtype']}, batch {data['batch_size']}; "
            f"searched on {data['search']} images, confirmed on {data['confirmation']} others",
            promise(content),
            f"every method at its own best schedule, the chosen one first, on the images the search did not see:\n"
            f"{_table(content)}",
            f"patch tokens of the chosen one: {tokens}",
            "\n".join(notes),
            f"agglo.apply(model, agglo.ReductionConfig.parse({str(self.config)!r}){tower})",
        ]
        return "\n\n".join(parts)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw each method's front and the chosen point, as measured on the images to search on, to a .png or .svg."""
        from agglo.drawing.charts import Curve, CurvePanel, Level, draw_curves

        content, settings, data = self.content, self.content["settings"], self.content["data"]
        target, by_time = Target(**content["target"]), content["target"]["kind"] != "gflops"
        has_labels = Quality(**content["chosen"]["search"]).drop is not None

        def gain(row: Entry) -> float:
            return float(row["speed"]["median"] if by_time else 1 / row["gflops"])

        def curve(name: str, rows: Sequence[Entry], *, ringed: bool = False) -> Curve:
            found = [Quality(**row["search"]) for row in rows]
            drops = [each.drop for each in found if each.drop is not None]
            # A logarithmic scale has no zero.
            heights = [drop.points for drop in drops] or [max(each.distance, 1e-9) for each in found]
            errors = [drop.error for drop in drops] or [each.distance_error for each in found]
            ranges = [(row["speed"]["low"], row["speed"]["high"]) for row in rows] if by_time else None
            return Curve(name, [gain(row) for row in rows], heights, errors, ranges, ringed=ringed)

        rows = sorted(content["front"], key=gain)
        curves = [curve(m, [row for row in rows if row["method"] == m]) for m in {row["method"]: row for row in rows}]
        curves.append(curve("chosen", [content["chosen"]], ringed=True))
        x_title = "times as fast as dense" if by_time else "times fewer GFLOPs than dense"
        y_title = "points of accuracy lost" if has_labels else f"{settings['objective']} distance to the dense output"
        panel = CurvePanel(curves, x_title, y_title, Level(0.0, x=1.0) if has_labels else None, y_log=not has_labels)
        measured = f"{_device(content)}, {settings['dtype']}, batch {data['batch_size']}"
        note = f"bars: standard error of {data['search']} images"
        draw_curves([panel], Path(path), title=f"{content['model']['name']}: {target}\n{measured}", note=note)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file, which `Tuned.load` and `agglo.apply(model, tuned=path)` read."""
        write_json(Path(path), self.content)


def _device(content: Entry) -> str:
    machine = content["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {content['settings']['threads']} threads"


def promise(content: Entry) -> str:
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


def _table(content: Entry) -> str:
    columns = [Column("method", left=True), Column("x dense"), Column("GFLOPs", ".3f")]
    columns += [Column(content["settings"]["objective"]), Column("decisions changed"), Column("accuracy lost")]
    rows: list[list[Any]] = []
    for row in (content["chosen"], *content["beside"]):
        quality, speed = Quality(**row["confirmation"]), row["speed"]
        cells = [str(ReductionConfig.from_dict(row["config"]))]
        cells += [f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})", row["gflops"]]
        cells += [f"{quality.distance:.4g} +- {quality.distance_error:.2g}"]
        rows.append([*cells, *(drop and str(drop) for drop in (quality.disagreement, quality.drop))])
    if (accuracy := content["dense"]["accuracy"]) is not None:
        rows.append([f"dense, accuracy {accuracy:.2f}", *[None] * 5])
    return Table(columns, rows).text()
