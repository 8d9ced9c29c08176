"""What `agglo.tune` returns, its report and its chart; what images can show: means, standard errors, differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.tuned import read
from agglo.tuning.settings import Target
from agglo.utils.files import write_json
from agglo.utils.machine import load_warning
from agglo.utils.tables import Column, Table

Entry = Mapping[str, Any]  # of the JSON file: all of it, or the row of a config
SURE = 2.0  # standard errors that make a promise


@dataclass(frozen=True)
class Quality:
    """How near a reduced model's outputs are to the dense model's: sums over images, so that parts add up.

    Attributes:
        images: Number of images.
        total: Sum of the distances to the dense outputs.
        squares: Sum of their squares.
        differing: Images whose top class is not the dense model's; None if outputs are not logits.
        lost: Images that only the dense model classifies correctly; None without labels.
        gained: Images that only the reduced model classifies correctly; None without labels.
    """

    images: int
    total: float
    squares: float
    differing: int | None = None
    lost: int | None = None
    gained: int | None = None

    def __add__(self, other: Quality) -> Quality:
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Quality(*sums)

    @property
    def distance(self) -> float:
        """The mean distance to the dense output; never below 0, where rounding can take a KL divergence."""
        return max(self.total / self.images, 0.0)

    @property
    def distance_error(self) -> float:
        """Standard error of the mean distance; infinite for one image."""
        if self.images < 2:
            return math.inf
        variance = (self.squares - self.total**2 / self.images) / (self.images - 1)
        return math.sqrt(max(variance, 0.0) / self.images)

    @property
    def drop(self) -> Drop | None:
        """Accuracy lost; None without labels."""
        return None if self.lost is None else Drop.paired(self.lost, self.gained or 0, self.images)

    @property
    def disagreement(self) -> Drop | None:
        """Decisions that changed, an upper bound of the accuracy lost; None if outputs are not logits."""
        return None if self.differing is None else Drop.paired(self.differing, 0, self.images)

    @property
    def loss(self) -> Drop:
        """What `max_drop` is about: accuracy where there are labels, otherwise decisions that changed."""
        found = self.drop or self.disagreement
        assert found is not None
        return found


@dataclass(frozen=True)
class Drop:
    """Accuracy lost, with its standard error, both in percentage points."""

    points: float
    error: float

    @classmethod
    def paired(cls, lost: int, gained: int, images: int) -> Drop:
        """Return the drop of images that are each lost, gained or neither.

        The error is that of the mean of -1, 0 and 1, and at least what it would be had one image been lost: images on
        which nothing happened do not prove that nothing can.
        """
        mean = (lost - gained) / images
        variance = max((lost + gained) / images - mean**2, 1 / images - 1 / images**2)
        return cls(100 * mean, 100 * math.sqrt(variance / images))

    def __str__(self) -> str:
        return f"{self.points:.2f} +- {self.error:.2f}"

    def within(self, most: float) -> bool | None:
        """Return whether at most so many points are lost, by two standard errors; None if neither is shown."""
        if self.points + SURE * self.error <= most:
            return True
        return False if self.points - SURE * self.error > most else None


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
        if self.speedup < 1:
            notes.append(
                f"beware: at {self.speedup:.2f} times the dense model's speed this saves GFLOPs, and no time here"
            )
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
        from agglo.drawing.charts import Curve, CurvePanel, DenseLine, draw_curves

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
        panel = CurvePanel(
            curves, x_title, y_title, DenseLine(0.0, x=1.0) if has_labels else None, y_log=not has_labels
        )
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
