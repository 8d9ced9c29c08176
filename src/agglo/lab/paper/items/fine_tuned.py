"""The paper's big table: every method at every keep rate, fine-tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import DEITS, EMBEDDED, IMAGES, RATES, ClassifierScale, Subject
from agglo.lab.paper.compare import DENSE, Value
from agglo.lab.paper.study import Cell, Need, Result, RunCell, Section, Settings, Study

# Methods that claims are made about, and the keep rates at which they have the scale's seeds; all others have one.
_REPEATED, _REPEATED_RATES = (*classifiers.OURS, *classifiers.HARD), (0.25, 0.5)


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[Cell]:
    for subject in scale.subjects:
        for rate in (None, *RATES):
            for name in [DENSE] if rate is None else [entry.name for entry in scale.entries]:
                repeated = name in _REPEATED and rate in _REPEATED_RATES
                for seed in range(settings.seeds or (scale.seeds if repeated else 1)):
                    about = {"model": subject.model, "data": subject.data, "method": name, "keep_rate": rate}
                    yield Cell({**about, "seed": seed}, (*subject.needs, *_teacher(name, subject)))


def _teacher(method: str, subject: Subject) -> tuple[Need, ...]:
    """Return what DynamicViT learns from, where the published model was trained on other data."""
    if not subject.weights or not method.startswith("dynamicvit") or subject.data == "imagenet":
        return ()
    about = f"{subject.model} trained on {subject.data}: DynamicViT's teacher"
    return (Need("weights", classifiers.weights_name(subject.model, subject.data), about),)


def _run(scale: ClassifierScale, settings: Settings) -> RunCell:
    folder = settings.run_folder("fine-tuned")
    roots = {s.data: s.training_root(settings, folder) for s in scale.subjects if s.data in settings.data}

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        subject, entry = scale.subject(about), classifiers.named(scale.entries, about["method"])
        choices = {"seed": about["seed"], "dataset": about["data"], **subject.start(settings)}
        for teacher in _teacher(about["method"], subject):
            choices["teacher"] = str(settings.weights[teacher.name])
        budget = {} if entry is None else {"keep_rate": about["keep_rate"]}
        place = folder / classifiers.run_name(about, "model", "data", "method", "keep_rate", "seed")
        found = classifiers.fine_tune(settings, scale.recipe, choices, entry, roots[subject.data], place, **budget)
        return {**found, "images": subject.images}

    return run


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (model, data), here in compare.grouped(results, "model", "data").items():
        metric = compare.metric_of(here)
        rows, _, measured = compare.by_method(here, "keep_rate", metric)
        images = printed.IMAGES.get(data) if metric == "top1" else None

        def expected(row: str, rate: float, where: Any = (model, data), images: int | None = images) -> Value | None:
            return compare.printed_value("fine-tuned", *where, row, rate, images=images)

        dense = printed.value("fine-tuned", model, data, DENSE)
        text = (
            f"{metric} (%), dense trained alike: {compare.dense_value(here, metric)}"
            f"{'' if dense is None else f' (printed: {dense:.2f})'}. Where there are several seeds, the mean, and in "
            f"brackets the standard deviation.{compare.remarks(rows, RATES, measured, expected)}"
            f"\n\n{compare.reasons(here)}"
        )
        sections.append(Section(f"{model}, {data}", compare.comparison(rows, RATES, measured, expected), text.strip()))
    return sections


FINE_TUNED = Study(
    name="fine-tuned",
    shows="table perfICCV",
    about="Accuracy of DeiT T, S and B after 30 epochs of training with fewer tokens, on four data sets, by sixteen "
    "methods",
    stands_in=f"The embedded classifier stands in, trained for one epoch on {EMBEDDED.training} images of "
    "Fashion-MNIST and evaluated on its test set; with six methods that the paper's table does not have, and three "
    "seeds at 25 and 50 % for the methods that merge hard.",
    gpu_hours="4,024",
    full=ClassifierScale(
        tuple(Subject(model, data, IMAGES[data], model) for model in DEITS for data in IMAGES), classifiers.PAPER
    ),
    miniature=ClassifierScale((EMBEDDED,), classifiers.ALL, recipe=str(classifiers.RECIPE), seeds=3),
    axes=_axes,
    run=_run,
    table=_table,
)
ITEMS = (FINE_TUNED,)
