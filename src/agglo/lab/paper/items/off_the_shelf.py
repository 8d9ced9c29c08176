"""ATC on models that never saw fewer tokens, and every other method that needs no training beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import (
    ALL,
    ATC,
    DEITS,
    DENSE,
    EMBEDDED,
    IMAGES,
    OURS,
    RELEASED,
    ClassifierScale,
    Entry,
    Evaluator,
    Subject,
    on_data,
)
from agglo.lab.paper.compare import (
    Value,
    accuracy_panels,
    beside,
    by_method,
    disagreements,
    grouped,
    metric_of,
    plain_table,
    printed_value,
    reasons,
)
from agglo.lab.paper.study import Cell, Result, RunCell, Section, Settings, Study
from agglo.schedule import Stages
from agglo.utils.tables import CANNOT

_OTHERS = tuple(entry for entry in ALL if not entry.learns and entry not in ATC)
# K-Medoids and DPC-KNN with equal weights, and with proportional attention, which neither has of its own.
_WEIGHTED = (
    Entry("kmedoids equal", "kmedoids", options={"weights": "equal"}),
    Entry("kmedoids equal, proportional", "kmedoids", options={"weights": "equal", "proportional": True}),
    Entry("dpc_knn equal, proportional", "dpc_knn", options={"weights": "equal", "proportional": True}),
)
_DEITS = tuple(
    Subject(model, size, data, *IMAGES[data], on_data(model, data)) for model, size in DEITS.items() for data in IMAGES
)
FULL = ClassifierScale(_DEITS, (*ATC, *RELEASED, *_OTHERS, *_WEIGHTED))
MINIATURE = ClassifierScale((EMBEDDED,), (*ATC, *RELEASED, *_OTHERS))


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[Cell]:
    for subject in scale.subjects:
        places = [(DENSE, None), *((entry.name, rate) for entry in scale.entries for rate in scale.rates)]
        for method, rate in places:
            about = {"model": subject.model, "data": subject.data, "method": method, "keep_rate": rate}
            cost = subject.images * subject.size.multiply_adds(None if rate is None else Stages(rate))
            yield Cell(about, subject.needs, cost)


def _run(scale: ClassifierScale, settings: Settings) -> RunCell:
    evaluate = Evaluator(settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        entry = scale.entry(about)
        return evaluate(scale.subject(about), None if entry is None else entry.config(about["keep_rate"]))

    return run


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    groups = grouped(results, "model", "data").items()
    return [section for (model, data), here in groups for section in _sections(model, data, here)]


def _sections(model: str, data: str, results: Sequence[Result]) -> list[Section]:
    dense = next((result for result in results if result["method"] == DENSE), None)
    metric = metric_of(results)
    rows, rates, measured = by_method(results, "keep_rate", metric)

    def expected(row: str, rate: float) -> Value | None:
        number = printed.value("off-the-shelf", model, data, row.removesuffix(" as released"), rate)
        return printed_value(number, printed.IMAGES.get(data) if metric == "top1" else None)

    papers = [row for row in rows if row.startswith("atc")]
    released = [row for row in papers if row.endswith("as released")]
    of_paper = printed.value("fine-tuned", model, data, DENSE)
    beside_dense = "" if of_paper is None else f" (printed: {of_paper:.2f})"
    of_dense = "not run" if dense is None else f"{dense[metric]:.2f}{beside_dense}"
    text = (
        f"{metric} (%) on {dense['images'] if dense else '?'} images; dense: {of_dense}. +- is one standard error, of "
        "both samples of images; where they are the same images, it is less."
    )
    exact = [row for row in papers if row not in released]
    for who, chosen in (("ATC as described", exact), ("As released", released)):
        if found := disagreements(chosen, rates, measured, expected):
            text += f" {who}: {found}."
    if all(expected(row, rate) is None for row in papers for rate in rates):
        text += " The paper prints nothing for this model on these data."
    parts = [Section(f"{model}, {data}: ATC", beside(papers, rates, measured, expected), text)]
    if others := [row for row in rows if row not in papers]:
        title = f"{model}, {data}: other methods, which the paper does not have off the shelf"
        parts.append(Section(title, beside(others, rates, measured), reasons(results)))
    groups = grouped(results, "method", "keep_rate")
    cost = plain_table(rows, rates, lambda row, rate: _cost(groups.get((row, rate))))
    gflops = "" if dense is None else f"Dense: {dense['gflops']:.2f} GFLOPs."
    return [*parts, Section(f"{model}, {data}: tokens, and GFLOPs in brackets", cost, gflops)]


def _cost(results: Sequence[Result] | None) -> str | None:
    if not results:
        return None
    result = results[0]
    if "cannot" in result:
        return CANNOT
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    shown = counts if result["varies"] == "no" else f"{result['varies'].replace('_', ' ')} {counts}"
    return f"{shown} ({result['gflops']:.2f})"


def _draw(results: Sequence[Result], scale: ClassifierScale, settings: Settings, folder: Path) -> list[Path]:
    bold = (*OURS, *(entry.name for entry in RELEASED), "tome")
    return accuracy_panels(results, folder / "accuracy.png", faint=lambda name: name not in bold)


ITEMS = (
    Study(
        name="off-the-shelf",
        shows="table perfICCVPartialOTS",
        about="Accuracy of DeiT T, S and B with tokens merged at blocks 3, 6 and 9 and no training: ATC as the paper "
        "describes it, ATC as the released code runs without proportional attention (sizes are not tracked), and every "
        "other method without parameters",
        stands_in="The embedded classifier and Fashion-MNIST's test set stand in.",
        full=FULL,
        miniature=MINIATURE,
        axes=_axes,
        run=_run,
        table=_table,
        draw=_draw,
    ),
)
