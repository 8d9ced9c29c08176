"""Merging before attention beside merging after it, at equal cost: the same classifier, images and schedules.

Before a block, fewer tokens enter its attention, so a schedule may leave more of them for the same GFLOPs; but keys are
not there yet, and tokens are compared by themselves. Schedules are geometric, from block 3 to the last one; how far
they fall follows from the GFLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec
from agglo.experiments.tables import Column, Table
from agglo.reproduce.classifiers import data_need, embedded_spec
from agglo.reproduce.compare import grouped
from agglo.reproduce.estimates import TINY, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.beyond import BETTER, BEYOND

LEVELS = (0.7, 0.5)  # of the dense model's GFLOPs
_DEIT = "deit_tiny_patch16_224"
_BEFORE = {"acts": "before block"}
_TOKENS = {"features": "tokens"}
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("atc", {}),
    ("atc", _TOKENS),
    ("atc", {**_TOKENS, **_BEFORE}),
    ("atc", BETTER),
    ("atc", {**BETTER, **_BEFORE}),
    ("tome", {}),
    ("tome", _TOKENS),
    ("tome", {**_TOKENS, **_BEFORE}),
)
_SHAPE: tuple[dict[str, Any], ...] = ({"curve": "geometric"}, {"start": 3}, {"last": 11}, {"stride": 1})
_IMAGES = 1000


class PlacesOfMerging(Item):
    name = "places"
    shows = BEYOND
    about = (
        "Merging before attention beside merging after it, at equal GFLOPs: how far DeiT-T's answers are from its "
        "dense ones"
    )
    miniature_about = "The embedded classifier and its 1000 images stand in."

    def needs(self, miniature: bool) -> Sequence[Need]:
        return () if miniature else (data_need("imagenet"), Need("weights", _DEIT, "DeiT-T, published"))

    def cells(self, settings: Settings) -> Sequence[Cell]:
        needs = () if settings.miniature else ("imagenet", _DEIT)
        size = Size(64, 12) if settings.miniature else TINY
        return [
            Cell(
                {"level": level, "method": method, "options": _text(options), "acts": _place(options)},
                needs,
                _IMAGES * level * size.multiply_adds(),
            )
            for level in LEVELS
            for method, options in WAYS
        ]

    def open(self, settings: Settings) -> RunCell:
        from agglo.tuning.classifiers import FolderSettings, prepare
        from agglo.tuning.images import split
        from agglo.tuning.points import Solver
        from agglo.tuning.space import Axis, Space
        from agglo.tuning.subject import Subject

        spec = embedded_spec() if settings.miniature else ModelSpec(_DEIT, settings.weights[_DEIT])
        root = embedded.IMAGES if settings.miniature else settings.data["imagenet"]
        chosen = FolderSettings(spec, root, images=_IMAGES, device=settings.device)
        ready = prepare(chosen)
        images = split(ready.images, ready.labels, batch_size=chosen.batch_size)
        subject = Subject(ready.model, images, output=ready.output, objective="kl", tower=None, n_tokens=None)
        ways = {(method, _text(options), _place(options)): options for method, options in WAYS}

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            method, options = about["method"], ways[about["method"], about["options"], about["acts"]]
            axes = [Axis(next(iter(value)), (value,)) for value in _SHAPE]
            space = Space(method, axes, {**options, "unread": "drop"})
            point = Solver(subject, {method: space}, by_time=False).solve(space.first(), about["level"])
            found = subject.quality(point.arguments, [*images.search, *images.confirmation])
            return {"gflops": point.cost.gflops, "quality": found.as_dict(), "images": _IMAGES}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        from agglo.tuning.statistics import quality_from

        columns = [Column("method", left=True), Column("acts", left=True)]
        columns += [Column(f"{what} at {level:g}") for level in LEVELS for what in ("KL", "points lost")]
        rows = []
        for (method, options, acts), here in grouped(results, "method", "options", "acts").items():
            row: list[Any] = [f"{method} {options}".strip(), acts]
            for level in LEVELS:
                at = [result for result in here if result["level"] == level and "quality" in result]
                if not at:
                    row += [None, None]
                    continue
                found = quality_from(at[0]["quality"])
                lost = None if found.drop is None else f"{found.drop.points:.1f} +- {found.drop.error:.1f}"
                row += [f"{found.distance:.3f} +- {found.distance_error:.3f}", lost]
            rows.append(row)
        text = (
            f"{_IMAGES} images; geometric schedules from block 3 that cost 0.7 and 0.5 of the dense model's GFLOPs; "
            "+- one "
            "standard error."
        )
        return [Section("Distance to the dense answers", Table(columns, rows), text)] if rows else []


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={options[name]}" for name in BETTER if name in options)


def _place(options: dict[str, Any]) -> str:
    return str(options.get("acts", "after attention"))


ITEMS = (PlacesOfMerging(),)
