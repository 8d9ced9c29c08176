"""The paper's big table: every method at every keep rate, fine-tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import DEITS, EMBEDDED, IMAGES, RATES, ClassifierScale, FineTuner, Subject
from agglo.lab.paper.compare import DENSE, Value
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, Study, StudyCell

# Methods that claims are made about, and the keep rates at which they have the scale's seeds; all others have one.
_REPEATED, _REPEATED_RATES = (*classifiers.OURS, *classifiers.HARD), (0.25, 0.5)


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    for subject in scale.subjects:
        for rate in (None, *RATES):
            for name in [DENSE] if rate is None else [entry.name for entry in scale.entries]:
                repeated = name in _REPEATED and rate in _REPEATED_RATES
                for seed in range(settings.seeds or (scale.seeds if repeated else 1)):
                    about = {"model": subject.model, "data": subject.data, "method": name, "keep_rate": rate}
                    yield StudyCell({**about, "seed": seed}, (*subject.needs, *_teacher(name, subject)))


def _teacher(method: str, subject: Subject) -> tuple[Need, ...]:
    """Return what DynamicViT learns from, where the published model was trained on other data."""
    if not subject.weights or not method.startswith("dynamicvit") or subject.data == "imagenet":
        return ()
    about = f"{subject.model} trained on {subject.data}: DynamicViT's teacher"
    return (Need("weights", classifiers.weights_name(subject.model, subject.data), about),)


def _run(scale: ClassifierScale, settings: Settings) -> RunCell:
    train = FineTuner("fine-tuned", scale, settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        needed = _teacher(about["method"], scale.subject(about))
        teacher = {"teacher": str(settings.weights[needed[0].name])} if needed else {}
        return train(about, {"keep_rate": about["keep_rate"]}, **teacher)

    return run


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (model, data), here in compare.grouped(results, "model", "data").items():
        metric = compare.metric_of(here)
        images = printed.IMAGES.get(data) if metric == "top1" else None

        def expected(row: str, rate: float, where: Any = (model, data), images: int | None = images) -> Value | None:
            return compare.printed_value("fine-tuned", *where, row, rate, images=images)

        found = replace(compare.by_method(here, "keep_rate", metric, expected=expected), columns=RATES)
        dense = printed.value("fine-tuned", model, data, DENSE)
        text = (
            f"{metric} (%), dense trained alike: {compare.dense_value(here, metric)}"
            f"{'' if dense is None else f' (printed: {dense:.2f})'}. Where there are several seeds, the mean, and in "
            f"brackets the standard deviation. {found.remarks()}\n\n{compare.reasons(here)}"
        )
        sections.append(Section(f"{model}, {data}", found.table(), text.strip()))
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
