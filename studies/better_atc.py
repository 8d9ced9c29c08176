"""What agglo's options beyond the paper add to ATC, off the shelf and fine-tuned, and where merging is best done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import mean, stdev
from typing import Any

from agglo.lab.paper import classifiers, compare
from agglo.lab.paper.classifiers import (
    ATC,
    DEITS,
    EMBEDDED,
    IMAGES,
    LINKAGES,
    RATES,
    ClassifierScale,
    Entry,
    FineTuner,
    Subject,
)
from agglo.lab.paper.items.off_the_shelf import run_evaluations
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import Result, RunCell, Section, Settings, StudyCell
from agglo.utils.tables import Column, Table
from studies import study

DEIT_TINY = Subject(DEITS[0], "imagenet", IMAGES["imagenet"], DEITS[0])
BETTER = {"features": "tokens", "importance": "class", "mean": "preserve_norm"}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"importance": "class"},
    {"importance": "received"},
    {"mean": "preserve_norm"},
    {"features": "tokens"},
    BETTER,
)


def _named(linkage: str, options: Mapping[str, Any], suffix: str = "", **how: Any) -> Entry:
    text = ",".join(f"{name}={value}" for name, value in options.items())
    name = " ".join(filter(None, (f"atc {linkage}", text))) + suffix
    return Entry(name, "atc", {"linkage": linkage, **options, **how})


_SAVING = (
    *(_named(linkage, {"features": "tokens"}, ", before block", place="before_block") for linkage in LINKAGES),
    _named("average", {}, ", unread dropped", last_block="class_token"),
)
_ENTRIES = (*(_named(linkage, options) for options in _OPTIONS for linkage in LINKAGES), *_SAVING)
_MINIATURE = ClassifierScale((EMBEDDED,), tuple(e for e in _ENTRIES if e.options["linkage"] == "average"), (0.25,))


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    """Yield every keep rate and method, and every seed where there is training."""
    [subject] = scale.subjects
    seeds = [{"seed": seed} for seed in range(settings.seeds or scale.seeds)] if scale.seeds > 1 else [{}]
    for rate in scale.rates:
        for entry in scale.entries:
            about = {"model": subject.model, "data": subject.data, "method": entry.name, "keep_rate": rate}
            yield from (StudyCell({**about, **seed}, subject.needs) for seed in seeds)


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


# The paper's ATC is named as in the fine-tuned table, which it is trained like.
_COMPARED = (ATC[1], Entry("better atc", "atc", {"linkage": "average", **BETTER}))


def _run_tuned(scale: ClassifierScale, settings: Settings) -> RunCell:
    train = FineTuner("better-tuned", scale, settings)
    return lambda about: train(about, {"keep_rate": about["keep_rate"]})


def _tuned_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    """Compare both seed by seed, at keep rates where they have at least two seeds in common."""
    found = {(r["method"], r["keep_rate"], r["seed"]): r["top1"] for r in results if "top1" in r}
    first, second = (entry.name for entry in _COMPARED)
    rows = []
    for rate in sorted({rate for _, rate, _ in found}, reverse=True):
        seeds = sorted(s for m, r, s in found if m == second and r == rate and (first, r, s) in found)
        if len(seeds) < 2:
            continue
        both = [[found[name, rate, seed] for seed in seeds] for name in (first, second)]
        gains = [ours - papers for papers, ours in zip(*both, strict=True)]
        means = [f"{mean(of_one):.2f} ({stdev(of_one):.2f})" for of_one in both]
        rows.append([compare.percent(rate), *means, f"{mean(gains):+.2f} +- {stdev(gains) / sqrt(len(gains)):.2f}"])
    columns = [Column("keep rate"), Column("the paper's ATC"), Column("the better ATC"), Column("difference")]
    text = (
        f"Mean of {scale.seeds} seeds and in brackets their standard deviation; the difference is taken seed by seed, "
        "+- its standard error."
    )
    return [Section("Fine-tuned top-1", Table(columns, rows), text)] if rows else []


ITEMS = (
    study(
        name="better-atc",
        about="What each option beyond the paper's ATC does to DeiT-T off the shelf",
        stands_in="Average linkage at 25 % alone; the embedded classifier and Fashion-MNIST's test set stand in.",
        full=ClassifierScale((DEIT_TINY,), _ENTRIES, RATES[::-1]),
        miniature=_MINIATURE,
        axes=_axes,
        run=run_evaluations,
        table=_table,
        borrow=_papers,
    ),
    study(
        name="better-tuned",
        about="The options beyond the paper beside the paper's ATC, both fine-tuned alike, average linkage",
        stands_in="It runs in miniature only: the embedded classifier trained for one epoch on 6000 images of "
        "Fashion-MNIST, three seeds.",
        full=None,
        miniature=ClassifierScale((EMBEDDED,), _COMPARED, recipe=str(classifiers.RECIPE), seeds=3),
        axes=_axes,
        run=_run_tuned,
        table=_tuned_table,
    ),
)
