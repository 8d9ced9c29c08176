"""ATC on models that never saw fewer tokens, and every other method that needs no training beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.reproduce import printed
from agglo.reproduce.classifiers import (
    ALL,
    ATC,
    DENSE,
    FASHION,
    OURS,
    RATES,
    RELEASED,
    Entry,
    Evaluator,
    data_need,
    embedded_spec,
    named,
    on_data,
)
from agglo.reproduce.compare import (
    Value,
    beside,
    disagreements,
    grouped,
    over_seeds,
    percent,
    printed_value,
    reasons,
    unprinted,
)
from agglo.reproduce.curves import accuracy_panels
from agglo.reproduce.estimates import BASE, SMALL, TINY, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.schedule import Stages

_OTHERS = tuple(entry for entry in ALL if not entry.learns and entry not in ATC)
# K-Medoids and DPC-KNN with equal weights, and with proportional attention, which neither has of its own.
_WEIGHTED = (
    Entry("kmedoids equal", "kmedoids", options={"weights": "equal"}),
    Entry("kmedoids equal, proportional", "kmedoids", options={"weights": "equal"}, proportional=True),
    Entry("dpc_knn equal, proportional", "dpc_knn", options={"weights": "equal"}, proportional=True),
)
ENTRIES = (*ATC, *RELEASED, *_OTHERS, *_WEIGHTED)


@dataclass(frozen=True)
class Scale:
    """models: with their sizes. images: of the validation split, by data set."""

    models: dict[str, Size]
    images: dict[str, int]
    entries: tuple[Entry, ...] = ENTRIES
    rates: tuple[float, ...] = RATES


FULL = Scale(
    {"deit_tiny_patch16_224": TINY, "deit_small_patch16_224": SMALL, "deit_base_patch16_224": BASE},
    {"imagenet": 50_000, "nabirds": 24_633, "coco": 40_137, "nuswide": 44_000},
)
MINIATURE = Scale({embedded.NAME: Size(64, 12)}, {FASHION: 10_000}, (*ATC, *RELEASED, *_OTHERS))


class OffTheShelf(Item):
    name = "off-the-shelf"
    shows = "table perfICCVPartialOTS"
    about = (
        "Accuracy of DeiT T, S and B with tokens merged at blocks 3, 6 and 9 and no training: ATC as the paper "
        "describes it, ATC as the released code runs without proportional attention (sizes are not tracked), and every "
        "other method without parameters"
    )
    miniature_about = "The embedded classifier and Fashion-MNIST's test set stand in."

    def needs(self, miniature: bool) -> Sequence[Need]:
        scale = MINIATURE if miniature else FULL
        data = [data_need(name) for name in scale.images]
        if miniature:
            return data
        weights = [
            Need("weights", on_data(model, name), f"{model} trained on {name}")
            for model in scale.models
            for name in scale.images
        ]
        return [*data, *weights]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = MINIATURE if settings.miniature else FULL
        cells = []
        for model, size in scale.models.items():
            for data, images in scale.images.items():
                needs = (data,) if settings.miniature else (data, on_data(model, data))
                where: dict[str, Any] = {"model": model, "data": data}
                about = {**where, "method": DENSE, "keep_rate": None}
                cells.append(Cell(about, needs, images * size.multiply_adds()))
                for entry in scale.entries:
                    for rate in scale.rates:
                        about = {**where, "method": entry.name, "keep_rate": rate}
                        cells.append(Cell(about, needs, images * size.multiply_adds(Stages(rate))))
        return cells

    def open(self, settings: Settings) -> RunCell:
        evaluate = Evaluator(settings)

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            dense = about["method"] == DENSE
            variant = None if dense else named(ENTRIES, about["method"]).variant(about["keep_rate"])
            spec = embedded_spec() if settings.miniature else _spec(settings, about["model"], about["data"])
            return evaluate(spec, about["data"], settings.data[about["data"]], variant)

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        found = []
        for (model, data), here in grouped(results, "model", "data").items():
            found += _sections(str(model), str(data), here)
        return found

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        return accuracy_panels(results, folder / "accuracy.png", faint=_faint)


def _spec(settings: Settings, model: str, data: str) -> ModelSpec:
    return ModelSpec(model, settings.weights[on_data(model, data)])


def _faint(name: str) -> bool:
    return name not in (*OURS, *(entry.name for entry in RELEASED), "tome")


def _sections(model: str, data: str, results: Sequence[Result]) -> list[Section]:
    dense = next((result for result in results if result["method"] == DENSE), None)
    metric = metric_of(results)
    by_place = grouped(results, "method", "keep_rate")
    rates = sorted({result["keep_rate"] for result in results} - {None}, reverse=True)

    def measured(row: str, rate: float) -> Value | str | None:
        return over_seeds(by_place.get((row, rate), []), metric)

    def expected(row: str, rate: float) -> Value | None:
        number = printed.value("off-the-shelf", model, data, row.removesuffix(" as released"), rate)
        return printed_value(number, printed.IMAGES.get(data) if metric == "top1" else None)

    rows = list(dict.fromkeys(str(result["method"]) for result in results if result["method"] != DENSE))
    papers = [row for row in rows if row.startswith("atc")]
    images = dense["images"] if dense else "?"
    of_paper = printed.value("fine-tuned", model, data, DENSE)
    beside_dense = "" if of_paper is None else f" (printed: {of_paper:.2f})"
    of_dense = "not run" if dense is None else f"{dense[metric]:.2f}{beside_dense}"
    said = [
        f"{who}: {found}"
        for who, chosen in (("ATC as described", _exact(papers)), ("As released", _released(papers)))
        if (found := disagreements(chosen, rates, measured, expected))
    ]
    text = (
        f"{metric} (%) on {images} images; dense: {of_dense}. +- is one standard error, of both samples of images; "
        "where they are the same images, it is less."
    )
    nothing = unprinted(papers, rates, expected)
    text = " ".join([text, *(f"{line}." for line in said), *([nothing] if nothing else [])])
    parts = [Section(f"{model}, {data}: ATC", beside("method", papers, rates, measured, expected, percent), text)]
    others = [row for row in rows if row not in papers]
    why = reasons(results)
    if others:
        table = beside("method", others, rates, measured, lambda row, rate: None, percent)
        title = f"{model}, {data}: other methods, which the paper does not have off the shelf"
        parts.append(Section(title, table, why))
    cost = Table(
        [Column("method", left=True), *(Column(percent(rate)) for rate in rates)],
        [[row, *(_cost(by_place.get((row, rate))) for rate in rates)] for row in rows],
    )
    gflops = "" if dense is None else f"Dense: {dense['gflops']:.2f} GFLOPs."
    parts.append(Section(f"{model}, {data}: tokens, and GFLOPs in brackets", cost, gflops))
    return parts


def _exact(rows: Sequence[str]) -> list[str]:
    return [row for row in rows if not row.endswith("as released")]


def _released(rows: Sequence[str]) -> list[str]:
    return [row for row in rows if row.endswith("as released")]


def _cost(results: Sequence[Result] | None) -> str | None:
    if not results:
        return None
    result = results[0]
    if "cannot" in result:
        return CANNOT
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    shown = counts if result["varies"] == "no" else f"{result['varies']} {counts}"
    return f"{shown} ({result['gflops']:.2f})"


def metric_of(results: Sequence[Result]) -> str:
    """mAP where images have several labels, otherwise top1."""
    return "mAP" if any("mAP" in result for result in results) else "top1"


ITEMS = (OffTheShelf(),)
