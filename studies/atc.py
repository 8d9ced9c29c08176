"""What agglo's options beyond the paper add to ATC off the shelf, and whether to merge before attention or after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from agglo.budget import solve
from agglo.lab.paper import compare
from agglo.lab.paper.classifiers import ATC, DEITS, EMBEDDED, IMAGES, LINKAGES, RATES, Backbone, ClassifierScale, Entry
from agglo.lab.paper.items.off_the_shelf import run_evaluations
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.classification.evaluation.grid import EvaluationSettings
from agglo.lab.tasks.classification.tuning import prepare
from agglo.tuning.images import split
from agglo.tuning.result import Quality
from agglo.tuning.settings import TuneSettings
from agglo.tuning.space import Space
from agglo.tuning.subject import Subject
from agglo.utils.tables import Column, Table
from studies import study

DEIT_TINY = Backbone(DEITS[0], "imagenet", IMAGES["imagenet"], DEITS[0])
BETTER = {"features": "tokens", "importance": "class", "mean": "preserve_norm"}
_TOKENS = {"features": "tokens"}
_BEFORE = {"place": "before_block"}
_OPTIONS = ({"importance": "class"}, {"importance": "received"}, {"mean": "preserve_norm"}, _TOKENS, BETTER)


def _named(linkage: str, options: Mapping[str, Any], suffix: str = "", **how: Any) -> Entry:
    text = ",".join(f"{name}={value}" for name, value in options.items())
    name = " ".join(filter(None, (f"atc {linkage}", text))) + suffix
    return Entry(name, "atc", {"linkage": linkage, **options, **how})


_SAVING = (
    *(_named(linkage, _TOKENS, ", before block", **_BEFORE) for linkage in LINKAGES),
    _named("average", {}, ", unread dropped", last_block="class_token"),
)
_ENTRIES = (*(_named(linkage, options) for options in _OPTIONS for linkage in LINKAGES), *_SAVING)


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    [subject] = scale.subjects
    for rate in scale.rates:
        for entry in scale.entries:
            about = {"model": subject.model, "data": subject.data, "method": entry.name, "keep_rate": rate}
            yield StudyCell(about, subject.needs)


def _papers(settings: Settings) -> list[Result]:
    """Return the results of the paper's ATC, from the table off the shelf."""
    subject = EMBEDDED if settings.miniature else DEIT_TINY
    wanted = [(entry.name, subject.model, subject.data) for entry in ATC]
    found = read_results(settings.folder("off-the-shelf"))
    return [result for result in found if (result["method"], result["model"], result["data"]) in wanted]


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    if not results:
        return []
    found = compare.by_method(results, "keep_rate", "top1")
    names = [entry.name for entry in (*ATC, *_ENTRIES)]
    images = next(result["images"] for result in results if "images" in result)
    saving = [r for r in results if r["method"] in ("atc average", *(entry.name for entry in _SAVING))]
    table = replace(found, rows=[name for name in names if name in found.rows]).table()
    return [
        Section("Top-1", table, f"% of {images} images."),
        Section("GFLOPs, where an option saves some", compare.by_rate(saving, lambda result: result["gflops"], ".2f")),
    ]


# Before a block, fewer tokens enter its attention, so a schedule may leave more of them for the same GFLOPs; but keys
# are not there yet, and tokens are compared by themselves.
LEVELS = (0.7, 0.5)  # of the dense model's GFLOPs
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("atc", options) for options in ({}, _TOKENS, {**_TOKENS, **_BEFORE}, BETTER, {**BETTER, **_BEFORE})),
    *(("tome", options) for options in ({}, _TOKENS, {**_TOKENS, **_BEFORE})),
)
_SCHEDULE = {"curve": "geometric", "start": 3, "last": 11, "stride": 1}
_IMAGES = 1000


def _about(level: float, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    text = ", ".join(f"{name}={options[name]}" for name in BETTER if name in options)
    return {"level": level, "method": method, "options": text, "place": options.get("place", "after_attention")}


def _places_axes(subject: Backbone, settings: Settings) -> Iterator[StudyCell]:
    for level in LEVELS:
        for way in WAYS:
            yield StudyCell(_about(level, *way), subject.needs)


def _run_places(subject: Backbone, settings: Settings) -> RunCell:
    chosen = EvaluationSettings(subject.spec(settings), subject.root(settings), images=_IMAGES, device=settings.device)
    model, batches, output = prepare(chosen)
    images = split(batches, batch_size=chosen.batch_size)
    tuned = Subject(model, images, TuneSettings(output=output))

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        method, options = next(way for way in WAYS if _about(about["level"], *way) == about)
        space = Space(method, {}, {**options, "last_block": "class_token", **_SCHEDULE})
        config = solve(partial(space.config, space.first), tuned.share, about["level"])
        found = tuned.quality(config, [*images.search, *images.confirmation])
        return {"gflops": tuned.cost(config).gflops, "quality": asdict(found), "images": _IMAGES}

    return run


def _places_table(results: Sequence[Result], subject: Backbone) -> list[Section]:
    columns = [Column("method", left=True), Column("place", left=True)]
    columns += [Column(f"{what} at {level:g}") for level in LEVELS for what in ("KL", "points lost")]
    rows = []
    for (method, options, place), here in compare.grouped(results, "method", "options", "place").items():
        qualities = {result["level"]: Quality(**result["quality"]) for result in here if "quality" in result}
        row: list[Any] = [f"{method} {options}".strip(), place]
        for found in map(qualities.get, LEVELS):
            row.append(found and f"{found.distance:.3f} +- {found.distance_error:.3f}")
            row.append(found and found.drop and f"{found.drop.points:.1f} +- {found.drop.error:.1f}")
        rows.append(row)
    text = (
        f"{_IMAGES} images; geometric schedules from block 3 that cost 0.7 and 0.5 of the dense model's GFLOPs; +- one "
        "standard error."
    )
    return [Section("Distance to the dense answers", Table(columns, rows), text)] if rows else []


ITEMS = (
    study(
        name="better-atc",
        about="What each option beyond the paper's ATC does to DeiT-T off the shelf",
        stands_in="Average linkage at 25 % alone; the embedded classifier and Fashion-MNIST's test set stand in.",
        full=ClassifierScale((DEIT_TINY,), _ENTRIES, RATES[::-1]),
        miniature=ClassifierScale(
            (EMBEDDED,), tuple(entry for entry in _ENTRIES if entry.options["linkage"] == "average"), (0.25,)
        ),
        axes=_axes,
        run=run_evaluations,
        table=_table,
        borrow=_papers,
    ),
    study(
        name="places",
        about="Merging before attention and after it at equal GFLOPs: the distance of DeiT-T's answers to its dense "
        "ones",
        stands_in="The embedded classifier and its 1000 images stand in.",
        full=DEIT_TINY,
        miniature=replace(EMBEDDED, bundled=True),
        axes=_places_axes,
        run=_run_places,
        table=_places_table,
    ),
)
