"""The search for warm-up, backbone rate and frozen epochs that the paper's fine-tuning goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.tables import Column, Table
from agglo.reproduce import printed
from agglo.reproduce.classifiers import ATC, FASHION, RATES, RECIPE, Entry, data_need, fashion_subset, fine_tune, named
from agglo.reproduce.compare import Value, grouped, over_seeds, percent
from agglo.reproduce.estimates import SMALL, TRAINING, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.schedule import Stages

_MODEL = "deit_small_patch16_224"
_SEARCHED = ("warmup_epochs", "backbone_lr_scale", "frozen_epochs")


@dataclass(frozen=True)
class Scale:
    """warmup, frozen: epochs to try, of `epochs`. choices: further settings of every run."""

    model: str
    size: Size
    data: str
    images: tuple[int, int]
    recipe: str
    entries: tuple[Entry, ...]
    rates: tuple[float, ...]
    epochs: int
    warmup: tuple[float, ...]
    frozen: tuple[int, ...]
    choices: dict[str, Any]
    evaluations: int

    def combinations(self) -> list[dict[str, Any]]:
        from agglo.classification.training.sweep import PAPER, cells

        scales = PAPER["backbone_lr_scale"]
        over = {"warmup_epochs": self.warmup, "backbone_lr_scale": scales, "frozen_epochs": self.frozen}
        return cells(over)


FULL = Scale(
    _MODEL, SMALL, "imagenet", (1_281_167, 50_000), "deit", ATC, RATES, epochs=30, warmup=(5, 20), frozen=(0, 5),
    choices={}, evaluations=60,
)  # fmt: skip
# A sixth and two thirds of the epochs, and a sixth, as 5 and 20 and 5 of 30.
MINIATURE = Scale(
    embedded.NAME, Size(64, 12), FASHION, (1000, 2000), str(RECIPE), ATC[1:2], (0.25,), epochs=6, warmup=(1, 4),
    frozen=(0, 1), choices={"epochs": 6, "evaluate_every": 6}, evaluations=1,
)  # fmt: skip


class HyperParameters(Item):
    name = "hyper-parameters"
    shows = "tables imagenetHyper, hyperAssign"
    about = "Warm-up, backbone rate and frozen epochs, searched for each linkage and keep rate on ImageNet with DeiT-S"
    miniature_about = (
        f"Average linkage at 25 %, the embedded classifier trained for six epochs on {MINIATURE.images[0]} images and "
        f"ranked on {MINIATURE.images[1]}: epochs are a fifth of the paper's."
    )

    def needs(self, miniature: bool) -> Sequence[Need]:
        scale = MINIATURE if miniature else FULL
        weights = [] if miniature else [Need("weights", _MODEL, "DeiT-S, published")]
        return [data_need(scale.data), *weights]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        scale = MINIATURE if settings.miniature else FULL
        training, validation = scale.images
        needs = (scale.data,) if settings.miniature else (scale.data, _MODEL)
        cells = []
        for entry in scale.entries:
            for rate in scale.rates:
                per_image = scale.size.multiply_adds(Stages(rate))
                work = per_image * (TRAINING * scale.epochs * training + scale.evaluations * validation)
                for seed in range(settings.seeds or 1):
                    for combination in scale.combinations():
                        about = {"method": entry.name, "keep_rate": rate, **combination, "seed": seed}
                        cells.append(Cell(about, needs, work))
        return cells

    def open(self, settings: Settings) -> RunCell:
        from agglo.classification.training.sweep import cell_name

        scale = MINIATURE if settings.miniature else FULL
        folder, root = settings.run_folder(self.name), settings.data[scale.data]
        if settings.miniature:
            root = fashion_subset(root, folder / "data", training=scale.images[0], test=scale.images[1])

        def run(cell: Cell) -> dict[str, Any]:
            about = cell.about
            combination = {name: about[name] for name in _SEARCHED}
            choices: dict[str, Any] = {**scale.choices, **combination, "seed": about["seed"]}
            if not settings.miniature:
                choices |= {"model": _MODEL, "checkpoint": str(settings.weights[_MODEL])}
            named_by = cell_name({**combination, "seed": about["seed"]})
            place = folder / f"{about['method']}-{about['keep_rate']}".replace(" ", "-") / named_by
            entry = named(scale.entries, about["method"])
            found = fine_tune(settings, scale.recipe, choices, entry, root, place, keep_rate=about["keep_rate"])
            return {**found, "images": scale.images[1]}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        epochs = 5 if settings.miniature else 1  # of the paper in one of ours
        places = grouped(results, "method", "keep_rate").items()
        return [
            *(_searched(str(method), float(str(rate)), here, epochs) for (method, rate), here in places),
            _assigned(),
        ]


def _searched(method: str, rate: float, results: Sequence[Result], epochs: int) -> Section:
    """Combinations by what they reached. epochs: of the paper in one of ours."""
    said = printed.value("hyper-parameters", method, rate)
    found = {own: over_seeds(of_one, "top1") for own, of_one in grouped(results, *_SEARCHED).items()}
    ranked = sorted(
        ((own, value) for own, value in found.items() if isinstance(value, Value)), key=lambda pair: -pair[1].number
    )
    columns = [*(Column(name.replace("_", " "), "g") for name in _SEARCHED), Column("top1")]
    columns.append(Column("the paper's choice", left=True))
    rows = []
    for (warmup, backbone, frozen), value in ranked:
        is_papers = [warmup * epochs, backbone, frozen * epochs] == said  # type: ignore[operator]
        rows.append([warmup, backbone, frozen, str(value), "yes" if is_papers else ""])
    text = f"Best first, of {len(ranked)} combinations."
    if len(ranked) > 1:
        apart, best = ranked[0][1].number - ranked[-1][1].number, ranked[0][1]
        of_seeds = "one run each says" if best.seeds == 1 else f"{best.seeds} runs each say"
        text += (
            f" Best and worst are {apart:.2f} points apart; the standard error of one accuracy is {best.error:.2f}, "
            f"and {of_seeds} nothing about smaller differences."
        )
    return Section(f"{method} at {percent(rate)}", Table(columns, rows), text)


def _assigned() -> Section:
    """What the paper prints for the other data sets, which nothing here can be measured against."""
    words = {"imagenet": "ImageNet's", "own": "its own"}
    rows = [
        [data, method, *(words[by_rate[str(rate)]] for rate in RATES)]
        for data, by_method in printed.table("hyper-assignment")["values"].items()
        for method, by_rate in by_method.items()
    ]
    columns = [Column("data set", left=True), Column("method", left=True)]
    columns += [Column(percent(rate), left=True) for rate in RATES]
    text = (
        "As printed: settings found on ImageNet, or those of the data set's own dense DeiT-S, whichever did better. "
        "The latter are published nowhere, so that `fine-tuned` takes what `agglo finetune deit --show` says."
    )
    return Section("The other data sets", Table(columns, rows), text)


ITEMS = (HyperParameters(),)
