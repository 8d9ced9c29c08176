"""The paper's big table: every method at every keep rate, fine-tuned; and the search for its hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import ATC, DEITS, EMBEDDED, IMAGES, RATES, Backbone, ClassifierScale, FineTuner
from agglo.lab.paper.compare import DENSE, Value, percent
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.utils.tables import Column, Table

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


def _teacher(method: str, subject: Backbone) -> tuple[Need, ...]:
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
        expected = compare.printed_accuracy("fine-tuned", model, data)
        found = replace(compare.by_method(here, "keep_rate", metric, expected=expected), columns=RATES)
        dense = printed.value("fine-tuned", model, data, DENSE)
        text = (
            f"{metric} (%), dense trained alike: {compare.dense_value(here, metric)}"
            f"{'' if dense is None else f' (printed: {dense:.2f})'}. Where there are several seeds, the mean, and in "
            f"brackets the standard deviation. {found.remarks()}\n\n{compare.reasons(here)}"
        )
        sections.append(Section(f"{model}, {data}", found.table(), text.strip()))
    return sections


_EPOCHS = 30  # of the paper's runs
# Values of the paper's search that it selected somewhere.
SEARCHED: dict[str, list[Any]] = {"warmup_epochs": [5, 20], "backbone_lr_scale": [0.01, 1.0], "frozen_epochs": [0, 5]}


def _shorter(scale: ClassifierScale) -> int:
    """Return how many of the paper's epochs one epoch stands for."""
    return _EPOCHS // int(scale.choices.get("epochs", _EPOCHS))


def _search_axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    # The same fractions of the run as 5 and 20 of 30 epochs.
    over = {name: [n // _shorter(scale) for n in SEARCHED[name]] for name in ("warmup_epochs", "frozen_epochs")}
    seeds = range(settings.seeds or scale.seeds)
    for entry, rate, seed in product(scale.entries, scale.rates, seeds):
        for values in product(*{**SEARCHED, **over}.values()):
            combination = dict(zip(SEARCHED, values, strict=True))
            about = {"method": entry.name, "keep_rate": rate, **combination, "seed": seed}
            yield StudyCell(about, scale.subjects[0].needs)


def _run_search(scale: ClassifierScale, settings: Settings) -> RunCell:
    train = FineTuner("hyper-parameters", scale, settings)
    return lambda about: train(about, {"keep_rate": about["keep_rate"]}, **{name: about[name] for name in SEARCHED})


def _search_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    """List combinations by what they reached, for each method and keep rate."""
    sections, epochs = [], _shorter(scale)
    for (method, rate), group in compare.grouped(results, "method", "keep_rate").items():
        chosen = printed.value("hyper-parameters", method, rate)
        values = {own: compare.over_seeds(here, "top1") for own, here in compare.grouped(group, *SEARCHED).items()}
        found = [(own, value) for own, value in values.items() if isinstance(value, Value)]
        found.sort(key=lambda pair: -pair[1].number)
        columns = [*(Column(name.replace("_", " "), "g") for name in SEARCHED), Column("top1")]
        columns.append(Column("the paper's choice", left=True))
        rows = []
        for (warmup, backbone, frozen), value in found:
            is_papers = [warmup * epochs, backbone, frozen * epochs] == chosen
            rows.append([warmup, backbone, frozen, str(value), "yes" if is_papers else ""])
        error = f"{found[0][1].error:.2f}"
        text = f"Best first, of {len(found)} combinations; the standard error of one accuracy is {error}."
        sections.append(Section(f"{method} at {percent(rate)}", Table(columns, rows), text))
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
        tuple(Backbone(model, data, IMAGES[data], model) for model in DEITS for data in IMAGES), classifiers.PAPER
    ),
    miniature=ClassifierScale((EMBEDDED,), classifiers.ALL, recipe=classifiers.RECIPE, seeds=3),
    axes=_axes,
    run=_run,
    table=_table,
)
HYPER_PARAMETERS = Study(
    name="hyper-parameters",
    shows="table imagenetHyper",
    about="Warm-up, backbone rate and frozen epochs, searched for each linkage and keep rate on ImageNet with DeiT-S",
    stands_in="Average linkage at 25 %, the embedded classifier trained for six epochs on 1000 images and ranked "
    "on 2000: epochs are a fifth of the paper's.",
    gpu_hours="843",
    full=ClassifierScale((Backbone(DEITS[1], "imagenet", IMAGES["imagenet"], DEITS[1]),), ATC),
    miniature=ClassifierScale(
        (replace(EMBEDDED, training=1000, images=2000),),
        ATC[1:2],
        (0.25,),
        classifiers.RECIPE,
        choices={"epochs": 6, "evaluate_every": 6},
    ),
    axes=_search_axes,
    run=_run_search,
    table=_search_table,
)
ITEMS = (FINE_TUNED, HYPER_PARAMETERS)
