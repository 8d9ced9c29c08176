"""The search for warm-up, backbone rate and frozen epochs that the paper's fine-tuning goes by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import ATC, DEITS, EMBEDDED, IMAGES, ClassifierScale, FineTuner, Subject
from agglo.lab.paper.compare import Value, percent
from agglo.lab.paper.study import Result, RunCell, Section, Settings, Study, StudyCell
from agglo.utils.tables import Column, Table

_EPOCHS = 30  # of the paper's runs
# Values of the paper's search that it selected somewhere.
PAPER: dict[str, list[Any]] = {"warmup_epochs": [5, 20], "backbone_lr_scale": [0.01, 1.0], "frozen_epochs": [0, 5]}


def _shorter(scale: ClassifierScale) -> int:
    """Return how many of the paper's epochs one epoch stands for."""
    return _EPOCHS // int(scale.choices.get("epochs", _EPOCHS))


def _axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    # The same fractions of the run as 5 and 20 of 30 epochs.
    over = {name: [n // _shorter(scale) for n in PAPER[name]] for name in ("warmup_epochs", "frozen_epochs")}
    seeds = range(settings.seeds or scale.seeds)
    for entry, rate, seed in product(scale.entries, scale.rates, seeds):
        for values in product(*{**PAPER, **over}.values()):
            combination = dict(zip(PAPER, values, strict=True))
            about = {"method": entry.name, "keep_rate": rate, **combination, "seed": seed}
            yield StudyCell(about, scale.subjects[0].needs)


def _run(scale: ClassifierScale, settings: Settings) -> RunCell:
    train = FineTuner("hyper-parameters", scale, settings)
    return lambda about: train(about, {"keep_rate": about["keep_rate"]}, **{name: about[name] for name in PAPER})


def _table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    groups = compare.grouped(results, "method", "keep_rate").items()
    return [_searched(method, rate, here, _shorter(scale)) for (method, rate), here in groups]


def _searched(method: str, rate: float, results: Sequence[Result], epochs: int) -> Section:
    """List combinations by what they reached. One epoch of ours stands for `epochs` of the paper."""
    chosen = printed.value("hyper-parameters", method, rate)
    values = {own: compare.over_seeds(here, "top1") for own, here in compare.grouped(results, *PAPER).items()}
    found = [(own, value) for own, value in values.items() if isinstance(value, Value)]
    ranked = sorted(found, key=lambda pair: -pair[1].number)
    columns = [*(Column(name.replace("_", " "), "g") for name in PAPER), Column("top1")]
    columns.append(Column("the paper's choice", left=True))
    rows = []
    for (warmup, backbone, frozen), value in ranked:
        is_papers = [warmup * epochs, backbone, frozen * epochs] == chosen
        rows.append([warmup, backbone, frozen, str(value), "yes" if is_papers else ""])
    text = f"Best first, of {len(ranked)} combinations; the standard error of one accuracy is {ranked[0][1].error:.2f}."
    return Section(f"{method} at {percent(rate)}", Table(columns, rows), text)


ITEMS = (
    Study(
        name="hyper-parameters",
        shows="table imagenetHyper",
        about="Warm-up, backbone rate and frozen epochs, searched for each linkage and keep rate on ImageNet with "
        "DeiT-S",
        stands_in="Average linkage at 25 %, the embedded classifier trained for six epochs on 1000 images and ranked "
        "on 2000: epochs are a fifth of the paper's.",
        gpu_hours="843",
        full=ClassifierScale((Subject(DEITS[1], "imagenet", IMAGES["imagenet"], DEITS[1]),), ATC),
        miniature=ClassifierScale(
            (replace(EMBEDDED, training=1000, images=2000),),
            ATC[1:2],
            (0.25,),
            str(classifiers.RECIPE),
            choices={"epochs": 6, "evaluate_every": 6},
        ),
        axes=_axes,
        run=_run,
        table=_table,
    ),
)
