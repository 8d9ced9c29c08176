"""The paper's big table: every method at every keep rate, fine-tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import (
    ALL,
    DEITS,
    DENSE,
    EMBEDDED,
    IMAGES,
    OURS,
    PAPER,
    RATES,
    RECIPE,
    ClassifierScale,
    Entry,
    Subject,
    fine_tune,
    on_data,
)
from agglo.lab.paper.compare import (
    Value,
    beside,
    by_method,
    dense_of,
    grouped,
    metric_of,
    printed_value,
    reasons,
    remarks,
)
from agglo.lab.paper.study import Cell, Need, Result, RunCell, Section, Settings, Study
from agglo.schedule import Stages

_DEITS = tuple(Subject(model, size, data, *IMAGES[data], model) for model, size in DEITS.items() for data in IMAGES)
FULL = ClassifierScale(_DEITS, PAPER)
MINIATURE = ClassifierScale((EMBEDDED,), ALL, recipe=str(RECIPE), epochs=1, evaluations=1, seeds=3)
# Methods that claims are made about, and the keep rates at which they have the scale's seeds; all others have one.
_REPEATED, _REPEATED_RATES = (*OURS, "kmedoids", "dpc_knn", "tome"), (0.25, 0.5)
_WHOLE_IN_TRAINING = ("dynamicvit", "dynamicvit_prsv")  # they mask tokens and keep them until they are done learning


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[Cell]:
    for subject in scale.subjects:
        for rate in (None, *RATES):
            for entry in (Entry(DENSE, "none"),) if rate is None else scale.entries:
                repeated = entry.name in _REPEATED and rate in _REPEATED_RATES
                for seed in range(settings.seeds or (scale.seeds if repeated else 1)):
                    about = {"model": subject.model, "data": subject.data, "method": entry.name, "keep_rate": rate}
                    needs = (*subject.needs, *_teacher(entry.name, subject))
                    yield Cell({**about, "seed": seed}, needs, _cost(scale, subject, entry.name, rate))


def _cost(scale: ClassifierScale, subject: Subject, method: str, rate: float | None) -> float:
    schedule = None if rate is None else Stages(rate)
    total = scale.training_cost(subject, schedule)
    if method in _WHOLE_IN_TRAINING:  # and one pass of the teacher
        total += (
            scale.epochs
            * subject.training
            * (4 * subject.size.multiply_adds() - 3 * subject.size.multiply_adds(schedule))
        )
    return total


def _teacher(method: str, subject: Subject) -> tuple[Need, ...]:
    """Return what DynamicViT learns from, where the published model was trained on other data."""
    if not subject.weights or method not in _WHOLE_IN_TRAINING or subject.data == "imagenet":
        return ()
    about = f"{subject.model} trained on {subject.data}: DynamicViT's teacher"
    return (Need("weights", on_data(subject.model, subject.data), about),)


def _run(scale: ClassifierScale, settings: Settings) -> RunCell:
    folder = settings.run_folder("fine-tuned")
    roots = {s.data: s.training_root(settings, folder) for s in scale.subjects if s.data in settings.data}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        subject, entry = scale.subject(about), scale.entry(about)
        choices = {"seed": about["seed"], "dataset": about["data"], **subject.start(settings)}
        for teacher in _teacher(about["method"], subject):
            choices["teacher"] = str(settings.weights[teacher.name])
        budget = {} if about["keep_rate"] is None else {"keep_rate": about["keep_rate"]}
        parts = [str(about[name]).replace(" ", "-") for name in ("model", "data", "method", "keep_rate", "seed")]
        place = folder / "_".join(parts)
        found = fine_tune(settings, scale.recipe, choices, entry, roots[subject.data], place, **budget)
        return {**found, "images": subject.images, "training_images": subject.training}

    return run


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    return [_section(model, data, here) for (model, data), here in grouped(results, "model", "data").items()]


def _section(model: str, data: str, results: Sequence[Result]) -> Section:
    metric = metric_of(results)
    rows, _, measured = by_method(results, "keep_rate", metric)

    def expected(row: str, rate: float) -> Value | None:
        images = printed.IMAGES.get(data) if metric == "top1" else None
        return printed_value(printed.value("fine-tuned", model, data, row, rate), images)

    said = printed.value("fine-tuned", model, data, DENSE)
    beside_dense = "" if said is None else f" (printed: {said:.2f})"
    text = (
        f"{metric} (%), dense trained alike: {dense_of(results, metric)}{beside_dense}. Where there are several seeds, "
        f"the mean, and in brackets the standard deviation.{remarks(rows, RATES, measured, expected)}"
        f"\n\n{reasons(results)}"
    )
    return Section(f"{model}, {data}", beside(rows, RATES, measured, expected), text.strip())


FINE_TUNED = Study(
    name="fine-tuned",
    shows="table perfICCV",
    about="Accuracy of DeiT T, S and B after 30 epochs of training with fewer tokens, on four data sets, by sixteen "
    "methods",
    stands_in=f"The embedded classifier stands in, trained for one epoch on {EMBEDDED.training} images of "
    "Fashion-MNIST and evaluated on its test set; with six methods that the paper's table does not have, and three "
    "seeds at 25 and 50 % for the methods that merge hard.",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (FINE_TUNED,)
