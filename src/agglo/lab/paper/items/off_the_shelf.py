"""ATC and every other method that needs no training, on models that never saw fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isqrt
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import ATC, DEITS, EMBEDDED, IMAGES, LINKAGES, Backbone, ClassifierScale, Entry, named
from agglo.lab.paper.compare import DENSE, RELEASED
from agglo.lab.paper.study import Result, RunCell, Section, Settings, Study, StudyCell
from agglo.models.opening import build
from agglo.patch import apply, remove, report

# Without proportional attention the released code does not track sizes at all.
_RELEASED = tuple(
    Entry(f"atc {linkage}{RELEASED}", "atc", {"linkage": linkage, "sizes": "ignored", "proportional": False})
    for linkage in LINKAGES
)
SMALLER = "smaller image"  # what one would do without a method
_OTHERS = tuple(entry for entry in classifiers.ALL if not entry.learns and entry not in ATC)
# K-Medoids and DPC-KNN with equal weights, and with proportional attention, which is no part of either.
_EQUAL: dict[str, Any] = {"weights": "equal"}
_WEIGHTED = (
    Entry("kmedoids equal", "kmedoids", _EQUAL),
    Entry("kmedoids equal, proportional", "kmedoids", {**_EQUAL, "proportional": True}),
    Entry("dpc_knn equal, proportional", "dpc_knn", {**_EQUAL, "proportional": True}),
    Entry("tofu proportional", "tofu", {"proportional": True}),
    Entry("pitome not proportional", "pitome", {"proportional": False}),
)
_SUBJECTS = tuple(
    Backbone(model, data, images, classifiers.weights_name(model, data))
    for model in DEITS
    for data, images in IMAGES.items()
)


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    names = (*(entry.name for entry in scale.entries), SMALLER)
    for subject in scale.subjects:
        for method, rate in ((DENSE, None), *((name, rate) for name in names for rate in scale.rates)):
            about = {"model": subject.model, "data": subject.data, "method": method, "keep_rate": rate}
            yield StudyCell(about, subject.needs)


def run_evaluations(scale: ClassifierScale, settings: Settings) -> RunCell:
    """Evaluate cells off the shelf, by their model, data, method and keep rate."""
    evaluate = classifiers.Evaluator(settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        subject = scale.subject(about)
        if about["method"] == SMALLER:
            return evaluate(with_smaller_images(subject, about["keep_rate"], settings), None)
        entry = named(scale.entries, about["method"])
        return evaluate(subject, None if entry is None else entry.config(about["keep_rate"]))

    return run


def with_smaller_images(subject: Backbone, keep_rate: float, settings: Settings) -> Backbone:
    """Return the model at the largest image size at which it takes no more multiply-adds than ATC at a keep rate."""
    model: Any = build(subject.spec(settings))

    def gflops(config: ReductionConfig) -> float:
        counted = report(apply(model, config))
        remove(model)
        assert counted is not None
        assert counted.gflops_after is not None
        return counted.gflops_after

    side, rows = model.patch_embed.patch_size[0], isqrt(subject.patches)
    budget = gflops(ATC[0].config(keep_rate))
    for size in range(side * (rows - 1), 0, -side):
        model.set_input_size(img_size=(size, size))
        if gflops(ReductionConfig(keep_rate=1.0)) <= budget:
            break
    return replace(subject, image_size=size)


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    groups = compare.grouped(results, "model", "data").items()
    return [section for (model, data), here in groups for section in _sections(model, data, here)]


def _sections(model: str, data: str, results: Sequence[Result]) -> list[Section]:
    dense: Mapping[str, Any] = next((result for result in results if result["method"] == DENSE), {})
    metric = compare.metric_of(results)
    expected = compare.printed_accuracy("off-the-shelf", model, data)
    found = compare.by_method(results, "keep_rate", metric, expected=expected)
    of_paper = printed.value("fine-tuned", model, data, DENSE)
    of_dense = f"{dense[metric]:.2f}" if dense else "not run"
    of_dense += f" (printed: {of_paper:.2f})" if dense and of_paper is not None else ""
    text = (
        f"{metric} (%) on {dense.get('images', '?')} images; dense: {of_dense}. +- is one standard error, of both "
        "samples of images; where they are the same images, it is less."
    )
    atc = replace(found, rows=[row for row in found.rows if row.startswith("atc")])
    others = replace(found, rows=[row for row in found.rows if row not in atc.rows])
    described, released = (
        replace(atc, rows=[entry.name for entry in entries if entry.name in atc.rows]).remarks()
        for entries in (ATC, _RELEASED)
    )
    text += f" {described}" if described == released else f" ATC as described: {described} As released: {released}"
    name = f"{model}, {data}"
    parts = [Section(f"{name}: ATC", atc.table(), text)]
    if others.rows:
        title = f"{name}: other methods, which the paper does not have off the shelf"
        parts.append(Section(title, others.table(), compare.reasons(results)))
    gflops = f"Dense: {dense['gflops']:.2f} GFLOPs." if dense else ""
    return [*parts, Section(f"{name}: tokens, and GFLOPs in brackets", compare.by_rate(results, _cost), gflops)]


def _cost(result: Result) -> str:
    counts = " ".join(str(count) for count, _ in groupby(result["counts"]))
    varies = result["varies"]
    return f"{'' if varies == 'no' else varies.replace('_', ' ') + ' '}{counts} ({result['gflops']:.2f})"


def _draw(results: Sequence[Result], scale: ClassifierScale, settings: Settings, folder: Path) -> list[Path]:
    bold = (*classifiers.OURS, *(entry.name for entry in _RELEASED), "tome")
    return compare.draw_accuracy(results, folder / "accuracy.png", lambda name: name not in bold)


ITEMS = (
    Study(
        name="off-the-shelf",
        shows="table perfICCVPartialOTS",
        about="Accuracy of DeiT T, S and B with tokens merged at blocks 3, 6 and 9 and no training: ATC as the paper "
        "describes it, ATC as the released code runs without proportional attention (sizes are not tracked), and every "
        "other method without parameters. Beside them the model as it is on smaller images, at no more than ATC's cost",
        stands_in="The embedded classifier and Fashion-MNIST's test set stand in.",
        gpu_hours="5.2",
        full=ClassifierScale(_SUBJECTS, (*ATC, *_RELEASED, *_OTHERS, *_WEIGHTED)),
        miniature=ClassifierScale((EMBEDDED,), (*ATC, *_RELEASED, *_OTHERS)),
        axes=_axes,
        run=run_evaluations,
        table=_table,
        draw=_draw,
    ),
)
