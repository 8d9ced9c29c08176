"""Studies of agglo's own, beyond the paper: what its options add to ATC, and where merging is best done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec
from agglo.experiments.tables import Column, Table
from agglo.reproduce.classifiers import (
    ATC,
    FASHION,
    LINKAGES,
    RATES,
    RECIPE,
    TRAINING_IMAGES,
    Entry,
    Evaluator,
    data_need,
    embedded_spec,
    fashion_subset,
    fine_tune,
    named,
)
from agglo.reproduce.compare import beside, grouped, over_seeds, percent
from agglo.reproduce.estimates import TINY, TRAINING, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.schedule import Stages

BEYOND = "beyond the paper"
_DEIT = "deit_tiny_patch16_224"
_SMALL = Size(64, 12)
BETTER = {"features": "tokens", "importance": "class", "mean": "preserve_norm"}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"importance": "class"},
    {"importance": "received"},
    {"mean": "preserve_norm"},
    {"features": "tokens"},
    BETTER,
)


def _named(linkage: str, options: Mapping[str, Any], suffix: str = "") -> Entry:
    text = ",".join(f"{name}={value}" for name, value in options.items())
    return Entry(" ".join(filter(None, (f"atc {linkage}", text))) + suffix, "atc", linkage, options)


_BEFORE = {f"atc {linkage} features=tokens, before block" for linkage in LINKAGES}
_DROPPED = "atc average, unread dropped"
_BETTER_ENTRIES = (
    *ATC,
    *(_named(linkage, options) for options in _OPTIONS for linkage in LINKAGES),
    *(_named(linkage, {"features": "tokens"}, ", before block") for linkage in LINKAGES),
    _named("average", {}, ", unread dropped"),
)


class BetterAtc(Item):
    name = "better-atc"
    shows = BEYOND
    about = "What each option beyond the paper's ATC does to DeiT-T off the shelf"
    miniature_about = "Average linkage at 25 % alone; the embedded classifier and Fashion-MNIST's test set stand in."

    def needs(self, miniature: bool) -> Sequence[Need]:
        if miniature:
            return [data_need(FASHION)]
        return [data_need("imagenet"), Need("weights", _DEIT, "DeiT-T, published")]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        data, model, size = (FASHION, embedded.NAME, _SMALL) if settings.miniature else ("imagenet", _DEIT, TINY)
        needs = (data,) if settings.miniature else (data, _DEIT)
        images = 10_000 if settings.miniature else 50_000
        return [
            Cell(
                {"model": model, "data": data, "method": entry.name, "keep_rate": rate},
                needs,
                images * size.multiply_adds(Stages(rate)),
            )
            for rate in ((0.25,) if settings.miniature else reversed(RATES))
            for entry in _BETTER_ENTRIES[len(ATC) :]
            if entry.linkage == "average" or not settings.miniature
        ]

    def open(self, settings: Settings) -> RunCell:
        evaluate = Evaluator(settings)

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            how: dict[str, Any] = {"acts": "before block"} if about["method"] in _BEFORE else {}
            how |= {"unread": "drop"} if about["method"] == _DROPPED else {}
            variant = named(_BETTER_ENTRIES, about["method"]).variant(about["keep_rate"], **how)
            spec = embedded_spec() if settings.miniature else ModelSpec(_DEIT, settings.weights[_DEIT])
            return evaluate(spec, about["data"], settings.data[about["data"]], variant)

        return run

    def borrowed(self, settings: Settings) -> Sequence[Result]:
        """The paper's ATC, from the table off the shelf."""
        from agglo.reproduce.record import read_results

        wanted = [entry.name for entry in ATC]
        found = read_results(settings.folder("off-the-shelf"))
        model = embedded.NAME if settings.miniature else _DEIT
        return [
            r for r in found if r["method"] in wanted and r["model"] == model and r["data"] in (FASHION, "imagenet")
        ]

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        everything = [*self.borrowed(settings), *results]
        if not results:
            return []
        by_place = grouped(everything, "method", "keep_rate")
        rates = sorted({result["keep_rate"] for result in everything}, reverse=True)
        rows = [entry.name for entry in _BETTER_ENTRIES if any(r["method"] == entry.name for r in everything)]

        def measured(row: str, rate: float) -> Any:
            return over_seeds(by_place.get((row, rate), []), "top1")

        images = next(result["images"] for result in everything if "images" in result)
        accuracy = beside("method", rows, rates, measured, lambda row, rate: None, percent)
        saving = [row for row in rows if row in ("atc average", _DROPPED) or row in _BEFORE]
        cost = Table(
            [Column("method", left=True), *(Column(percent(rate), ".2f") for rate in rates)],
            [[row, *(_gflops(by_place.get((row, rate))) for rate in rates)] for row in saving],
        )
        return [
            Section("Top-1", accuracy, f"% of {images} images."),
            Section("GFLOPs, where an option saves some", cost),
        ]


def _gflops(results: Sequence[Result] | None) -> float | None:
    return results[0].get("gflops") if results else None


class BetterTuned(Item):
    """The paper's ATC is named as in the fine-tuned table, which it is trained like."""

    name = "better-tuned"
    shows = BEYOND
    about = "The options beyond the paper beside the paper's ATC, both fine-tuned alike, average linkage"
    miniature_about = (
        f"It runs in miniature only: the embedded classifier trained for one epoch on {TRAINING_IMAGES} images of "
        "Fashion-MNIST, three seeds."
    )
    seeds = 3
    entries = (ATC[1], Entry("better atc", "atc", "average", BETTER))

    def needs(self, miniature: bool) -> Sequence[Need]:
        return [data_need(FASHION)] if miniature else ()

    def cells(self, settings: Settings) -> Sequence[Cell]:
        if not settings.miniature:
            return ()
        seeds = range(settings.seeds or self.seeds)
        return [
            Cell(
                {"model": embedded.NAME, "data": FASHION, "method": entry.name, "keep_rate": rate, "seed": seed},
                (FASHION,),
                _SMALL.multiply_adds(Stages(rate)) * (TRAINING * TRAINING_IMAGES + 10_000),
            )
            for rate in RATES
            for entry in self.entries
            for seed in seeds
        ]

    def open(self, settings: Settings) -> RunCell:
        folder = settings.run_folder(self.name)
        root = fashion_subset(settings.data[FASHION], folder / "data")

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            place = folder / f"{about['method'].replace(' ', '-')}-{about['keep_rate']}-seed{about['seed']}"
            entry = named(self.entries, about["method"])
            choices = {"seed": about["seed"]}
            found = fine_tune(settings, str(RECIPE), choices, entry, root, place, keep_rate=about["keep_rate"])
            return {**found, "images": 10_000, "training_images": TRAINING_IMAGES}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        rows = []
        for row in compared(results):
            both = [f"{mean(row[name]):.2f} ({stdev(row[name]):.2f})" for name in ("papers", "better")]
            rows.append([percent(row["keep_rate"]), *both, f"{row['gain']:+.2f} +- {row['error']:.2f}"])
        columns = [Column("keep rate"), Column("the paper's ATC"), Column("the better ATC"), Column("difference")]
        text = (
            f"Mean of {self.seeds} seeds and in brackets their standard deviation; the difference is taken seed by "
            "seed, +- its standard error."
        )
        return [Section("Fine-tuned top-1", Table(columns, rows), text)] if rows else []


def compared(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per keep rate: accuracies of both by the seeds that both have, at least two, and their difference seed by seed
    with its standard error."""
    papers_name, better_name = (entry.name for entry in BetterTuned.entries)
    found = {(r["method"], r["keep_rate"], r["seed"]): r["top1"] for r in results if "top1" in r}
    rows = []
    for rate in sorted({rate for _, rate, _ in found}, reverse=True):
        seeds = sorted(s for m, r, s in found if m == better_name and r == rate and (papers_name, r, s) in found)
        if len(seeds) < 2:
            continue
        papers, better = ([found[name, rate, seed] for seed in seeds] for name in (papers_name, better_name))
        gains = [ours - its for its, ours in zip(papers, better, strict=True)]
        error = stdev(gains) / sqrt(len(gains))
        rows.append({"keep_rate": rate, "papers": papers, "better": better, "gain": mean(gains), "error": error})
    return rows


ITEMS = (BetterAtc(), BetterTuned())
