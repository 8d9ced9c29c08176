"""The paper's big table: every method at every keep rate, fine-tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.reproduce import printed
from agglo.reproduce.classifiers import (
    ALL,
    DENSE,
    FASHION,
    OURS,
    PAPER,
    RATES,
    RECIPE,
    TRAINING_IMAGES,
    Entry,
    data_need,
    fashion_subset,
    fine_tune,
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
from agglo.reproduce.estimates import BASE, SMALL, TINY, TRAINING, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.schedule import Stages


@dataclass(frozen=True)
class Scale:
    """images: of training and validation, by data set. evaluations: passes over the validation split in one run.

    seeds: of the methods that claims are made about, at the keep rates of `repeated`; all other cells have one.
    """

    models: dict[str, Size]
    images: dict[str, tuple[int, int]]
    entries: tuple[Entry, ...]
    recipe: str
    epochs: int
    evaluations: int
    seeds: int = 1
    repeated: tuple[float, ...] = ()


FULL = Scale(
    {"deit_tiny_patch16_224": TINY, "deit_small_patch16_224": SMALL, "deit_base_patch16_224": BASE},
    {
        "imagenet": (1_281_167, 50_000),
        "nabirds": (23_929, 24_633),
        "coco": (82_081, 40_137),
        "nuswide": (176_000, 44_000),
    },
    PAPER,
    "deit",
    epochs=30,
    evaluations=60,  # the weights and their moving average, after every epoch
)
MINIATURE = Scale(
    {embedded.NAME: Size(64, 12)},
    {FASHION: (TRAINING_IMAGES, 10_000)},
    ALL,
    str(RECIPE),
    epochs=1,
    evaluations=1,
    seeds=3,
    repeated=(0.25, 0.5),
)
_REPEATED = (*OURS, "kmedoids", "dpc_knn", "tome")  # methods that claims are made about
_WHOLE_IN_TRAINING = ("dynamicvit", "dynamicvit_prsv")  # they mask tokens and keep them until they are done learning


class FineTuned(Item):
    name = "fine-tuned"
    shows = "table perfICCV"
    about = (
        "Accuracy of DeiT T, S and B after 30 epochs of training with fewer tokens, on four data sets, by sixteen "
        "methods"
    )
    miniature_about = (
        f"The embedded classifier stands in, trained for one epoch on {TRAINING_IMAGES} images of Fashion-MNIST and "
        "evaluated on its test set; with six methods that the paper's table does not have, and three seeds at 25 and "
        "50 % for the methods that merge hard."
    )

    def needs(self, miniature: bool) -> Sequence[Need]:
        scale = MINIATURE if miniature else FULL
        data = [data_need(name) for name in scale.images]
        if miniature:
            return data
        weights = [Need("weights", model, f"{model}, published") for model in scale.models]
        teachers = [
            Need("weights", on_data(model, name), f"{model} trained on {name}: DynamicViT's teacher")
            for model in scale.models
            for name in scale.images
            if name != "imagenet"
        ]
        return [*data, *weights, *teachers]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = MINIATURE if settings.miniature else FULL
        cells = []
        for model, size in scale.models.items():
            for data, images in scale.images.items():
                for rate in (None, *RATES):
                    for entry in (Entry(DENSE, "none"),) if rate is None else scale.entries:
                        for seed in range(_seeds(scale, settings, entry, rate)):
                            needs = () if settings.miniature else (model, *_teacher(entry, model, data))
                            about = {
                                "model": model,
                                "data": data,
                                "method": entry.name,
                                "keep_rate": rate,
                                "seed": seed,
                            }
                            work = _multiply_adds(scale, size, images, entry, rate)
                            cells.append(Cell(about, (data, *needs), work))
        return cells

    def open(self, settings: Settings) -> RunCell:
        scale = MINIATURE if settings.miniature else FULL
        folder = settings.run_folder(self.name)
        places = dict(settings.data)
        if settings.miniature:
            places[FASHION] = fashion_subset(settings.data[FASHION], folder / "data")

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            choices: dict[str, Any] = {"seed": about["seed"], "dataset": about["data"]}
            entry = None if about["method"] == DENSE else named(scale.entries, about["method"])
            if not settings.miniature:
                choices |= {"model": about["model"], "checkpoint": str(settings.weights[about["model"]])}
                if entry is not None and (teacher := _teacher(entry, about["model"], about["data"])):
                    choices["teacher"] = str(settings.weights[teacher[0]])
            budget = {} if about["keep_rate"] is None else {"keep_rate": about["keep_rate"]}
            parts = [str(about[name]).replace(" ", "-") for name in ("model", "data", "method", "keep_rate", "seed")]
            found = fine_tune(
                settings, scale.recipe, choices, entry, places[about["data"]], folder / "_".join(parts), **budget
            )
            training, validation = scale.images[about["data"]]
            return {**found, "images": validation, "training_images": training}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        return [
            _section(str(model), str(data), here) for (model, data), here in grouped(results, "model", "data").items()
        ]


def tuned_results(settings: Settings) -> list[Result]:
    """What fine-tuned has found so far."""
    from agglo.reproduce.record import read_results

    return read_results(settings.folder(FineTuned.name))


def _seeds(scale: Scale, settings: Settings, entry: Entry, rate: float | None) -> int:
    if settings.seeds is not None:
        return settings.seeds
    return scale.seeds if entry.name in _REPEATED and rate in scale.repeated else 1


def _teacher(entry: Entry, model: str, data: str) -> tuple[str, ...]:
    return (on_data(model, data),) if entry.name in _WHOLE_IN_TRAINING and data != "imagenet" else ()


def _multiply_adds(scale: Scale, size: Size, images: tuple[int, int], entry: Entry, rate: float | None) -> float:
    training, validation = images
    reduced = size.multiply_adds(None if rate is None else Stages(rate))
    whole = entry.name in _WHOLE_IN_TRAINING
    per_image = (TRAINING + 1) * size.multiply_adds() if whole else TRAINING * reduced  # and one pass of the teacher
    return scale.epochs * training * per_image + scale.evaluations * validation * reduced


def _section(model: str, data: str, results: Sequence[Result]) -> Section:
    metric = "mAP" if any("mAP" in result for result in results) else "top1"
    by_place = grouped(results, "method", "keep_rate")

    def measured(row: str, rate: float) -> Value | str | None:
        return over_seeds(by_place.get((row, rate), []), metric)

    def expected(row: str, rate: float) -> Value | None:
        images = printed.IMAGES.get(data) if metric == "top1" else None
        return printed_value(printed.value("fine-tuned", model, data, row, rate), images)

    rows = list(dict.fromkeys(str(result["method"]) for result in results if result["method"] != DENSE))
    dense = over_seeds([result for result in results if result["method"] == DENSE], metric)
    said = printed.value("fine-tuned", model, data, DENSE)
    beside_dense = "" if said is None else f" (printed: {said:.2f})"
    apart = disagreements(rows, RATES, measured, expected)
    text = (
        f"{metric} (%), dense trained alike: {dense}{beside_dense}. Where there are several seeds, the mean, and in "
        f"brackets the standard deviation.{apart and f' {apart}.'} {unprinted(rows, RATES, expected)}"
        f"\n\n{reasons(results)}"
    )
    return Section(f"{model}, {data}", beside("method", rows, RATES, measured, expected, percent), text.strip())


ITEMS = (FineTuned(),)
