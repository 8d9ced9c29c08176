"""Merging before attention beside merging after it, at equal cost: the same classifier, images and schedules.

Before a block, fewer tokens enter its attention, so a schedule may leave more of them for the same GFLOPs; but keys are
not there yet, and tokens are compared by themselves. Schedules are geometric, from block 3 to the last one; how far
they fall follows from the GFLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agglo.lab.paper.classifiers import EMBEDDED, Subject
from agglo.lab.paper.compare import grouped
from agglo.lab.paper.study import Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.classification.tuning import FolderSettings, prepare
from agglo.tuning.images import split
from agglo.tuning.search import solve
from agglo.tuning.settings import TuneSettings
from agglo.tuning.space import Space
from agglo.tuning.statistics import Quality
from agglo.tuning.subject import Subject as TunedSubject
from agglo.utils.tables import Column, Table
from studies import study
from studies.better_atc import BETTER, DEIT_TINY

LEVELS = (0.7, 0.5)  # of the dense model's GFLOPs
_BEFORE = {"place": "before_block"}
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
_SCHEDULE = {"curve": "geometric", "start": 3, "last": 11, "stride": 1}
_IMAGES = 1000


def _about(level: float, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    text = ", ".join(f"{name}={options[name]}" for name in BETTER if name in options)
    return {"level": level, "method": method, "options": text, "place": options.get("place", "after_attention")}


def _axes(subject: Subject, settings: Settings) -> Iterator[StudyCell]:
    for level in LEVELS:
        for way in WAYS:
            yield StudyCell(_about(level, *way), subject.needs)


def _run(subject: Subject, settings: Settings) -> RunCell:
    chosen = FolderSettings(subject.spec(settings), subject.root(settings), images=_IMAGES, device=settings.device)
    ready = prepare(chosen)
    images = split(ready.images, batch_size=chosen.batch_size)
    tuned = TunedSubject(ready.model, images, TuneSettings(objective="kl", output=ready.output))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        method, options = next(way for way in WAYS if _about(about["level"], *way) == about)
        space = Space(method, {}, {**options, "last_block": "class_token", **_SCHEDULE})
        config = solve(tuned, space, space.first, about["level"])
        found = tuned.quality(config, [*images.search, *images.confirmation])
        return {"gflops": tuned.cost(config).gflops, "quality": asdict(found), "images": _IMAGES}

    return run


def _table(results: Sequence[Result], subject: Subject) -> list[Section]:
    columns = [Column("method", left=True), Column("place", left=True)]
    columns += [Column(f"{what} at {level:g}") for level in LEVELS for what in ("KL", "points lost")]
    rows = []
    for (method, options, place), here in grouped(results, "method", "options", "place").items():
        row: list[Any] = [f"{method} {options}".strip(), place]
        for level in LEVELS:
            at = [result for result in here if result["level"] == level and "quality" in result]
            if not at:
                row += [None, None]
                continue
            found = Quality(**at[0]["quality"])
            lost = None if found.drop is None else f"{found.drop.points:.1f} +- {found.drop.error:.1f}"
            row += [f"{found.distance:.3f} +- {found.distance_error:.3f}", lost]
        rows.append(row)
    text = (
        f"{_IMAGES} images; geometric schedules from block 3 that cost 0.7 and 0.5 of the dense model's GFLOPs; +- one "
        "standard error."
    )
    return [Section("Distance to the dense answers", Table(columns, rows), text)] if rows else []


ITEMS = (
    study(
        name="places",
        about="Merging before attention beside merging after it, at equal GFLOPs: how far DeiT-T's answers are from "
        "its dense ones",
        stands_in="The embedded classifier and its 1000 images stand in.",
        full=DEIT_TINY,
        miniature=replace(EMBEDDED, bundled=True),
        axes=_axes,
        run=_run,
        table=_table,
    ),
)
