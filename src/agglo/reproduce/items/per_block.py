"""MAE, AugReg and SWAG models with t tokens removed per block: the table of MAE and the curves over t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.experiments.models import ModelSpec
from agglo.reproduce import printed
from agglo.reproduce.classifiers import (
    DENSE,
    FASHION,
    RECIPE,
    Entry,
    Evaluator,
    data_need,
    embedded_spec,
    fashion_subset,
    fine_tune,
    named,
)
from agglo.reproduce.compare import Value, beside, disagreements, grouped, over_seeds, printed_value, reasons, unprinted
from agglo.reproduce.curves import accuracy_panels
from agglo.reproduce.estimates import BASE, HUGE, LARGE, SMALL, TINY, TRAINING, Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.per_block import EXACT, KINDS, RELEASED, schedule_of

SHELF, TUNED = "off the shelf", "fine-tuned"
_ENTRIES = (*EXACT, *RELEASED)
_WHY = (
    "Rows called as released remove t - 1 tokens per block where t is asked for: the released code counts the class "
    "token among those that are left. If the printed rows of ATC were measured so, they had more tokens than ToMe's: "
    "21 instead of 10 at the end of ViT-B with t = 16, linear."
)


@dataclass(frozen=True)
class Model:
    """A model of a family. ts: how many tokens are removed per block. options: of timm, to build it.

    crop: as in an evaluation; None is the data set's protocol. image_size: pixels, if not the model's own.
    """

    name: str
    size: Size
    ts: tuple[int, ...]
    weights: str
    timm_name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    crop: float | None = None
    image_size: int | None = None

    def spec(self, settings: Settings) -> ModelSpec:
        if settings.miniature:
            return embedded_spec(self.image_size)
        return ModelSpec(self.timm_name or self.name, settings.weights[self.weights], options=self.options)


def _mae(name: str, size: Size, ts: tuple[int, ...], letter: str) -> Model:
    return Model(name, size, ts, f"mae_finetuned_vit_{letter}", options={"global_pool": "avg"})


_B, _L, _H = "vit_base_patch16_224.mae", "vit_large_patch16_224.mae", "vit_huge_patch14_224.mae"
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def _swag(name: str, size: Size, ts: tuple[int, ...], timm_name: str, pixels: int) -> Model:
    options = {"img_size": pixels, "pretrained_cfg_overlay": {**_IMAGENET, "input_size": (3, pixels, pixels)}}
    return Model(name, size, ts, name, timm_name, options, crop=1.0)


_FAMILIES = {
    "augreg": (
        *(
            Model(f"vit_{name}_patch16_224", size, tuple(range(17)), f"vit_{name}_patch16_224")
            for name, size in (("tiny", TINY), ("small", SMALL), ("base", BASE))
        ),
        Model("vit_large_patch16_224", LARGE, tuple(range(9)), "vit_large_patch16_224"),
        Model("vit_large_patch16_384", replace(LARGE, patches=576), (0, 5, 10, 15, 20, 23), "vit_large_patch16_384"),
    ),
    "swag": (
        _swag("vit_b16_in1k_384", replace(BASE, patches=576), tuple(range(0, 46, 5)), "vit_base_patch16_224", 384),
        _swag("vit_l16_in1k_512", replace(LARGE, patches=1024), tuple(range(0, 41, 5)), "vit_large_patch16_224", 512),
        _swag("vit_h14_in1k_518", replace(HUGE, patches=1369), tuple(range(0, 41, 5)), "vit_huge_patch14_224", 518),
    ),
    "mae": (
        _mae(_B, BASE, tuple(range(17)), "base"),
        _mae(_L, LARGE, tuple(range(9)), "large"),
        _mae(_H, HUGE, tuple(range(8)), "huge"),
    ),
}
_SMALL = Size(64, 12)
_IMAGES = 500  # that curves in miniature are measured on
_TRAINING, _TEST = 3000, 2000  # images of Fashion-MNIST for the table in miniature
_EMBEDDED = Model(embedded.NAME, _SMALL, (0, 4, 8, 12, 16), "")
_MINIATURES = {
    "augreg": (_EMBEDDED,),
    "swag": (
        replace(_EMBEDDED, name=f"{embedded.NAME} at 42 pixels", size=replace(_SMALL, patches=441),
                ts=(0, 18, 36), image_size=42),
    ),
    "mae": (_EMBEDDED,),
}  # fmt: skip
_TITLES = {"augreg": "AugReg", "swag": "SWAG", "mae": "MAE"}


def _data(settings: Settings) -> tuple[str, int]:
    return (FASHION, _IMAGES) if settings.miniature else ("imagenet", 50_000)


def _root(settings: Settings) -> Path:
    """Curves in miniature are of the images that come with agglo."""
    return embedded.IMAGES if settings.miniature else settings.data["imagenet"]


class Curves(Item):
    """Of one family. The MAE models run without proportional attention, as released, the others with it."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.name, self.shows = f"curves-{family}", f"figure ots_{family}"
        off = "out" if family == "mae" else ""
        self.about = (
            f"Top-1 of {_TITLES[family]} models off the shelf over t, the tokens removed per block, constant and "
            "linearly "
            f"falling, with{off} proportional attention; no numbers are printed"
        )
        self.miniature_about = (
            f"The embedded classifier stands in for {_TITLES[family]}, and {_IMAGES} of the images that come with it "
            "for ImageNet"
            f"{'; pictures are enlarged to 42 pixels, 441 tokens' if family == 'swag' else ''}."
        )

    def _models(self, miniature: bool) -> Sequence[Model]:
        return (_MINIATURES if miniature else _FAMILIES)[self.family]

    def _entries(self) -> tuple[Entry, ...]:
        return tuple(replace(entry, proportional=False if self.family == "mae" else None) for entry in _ENTRIES)

    def needs(self, miniature: bool) -> Sequence[Need]:
        if miniature:
            return ()
        weights = [Need("weights", m.weights, f"{_TITLES[self.family]}'s {m.name}") for m in self._models(False)]
        return [data_need("imagenet"), *weights]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        data, images = _data(settings)
        cells = []
        for model in self._models(settings.miniature):
            needs = () if settings.miniature else (data, model.weights)
            for t in model.ts:
                for kind in KINDS if t else (None,):
                    for entry in self._entries() if t else (Entry(DENSE, "none"),):
                        about = {"model": model.name, "schedule": kind, "method": entry.name, "t": t}
                        work = model.size.multiply_adds(
                            None if kind is None else schedule_of(kind, t, model.size, entry)
                        )
                        cells.append(Cell(about, needs, images * work))
        return cells

    def open(self, settings: Settings) -> RunCell:
        evaluate = Evaluator(settings, images=_IMAGES if settings.miniature else None)
        models = {model.name: model for model in self._models(settings.miniature)}

        def run(cell: Cell) -> dict[str, Any]:
            model = models[cell.about["model"]]
            return {
                "data": _data(settings)[0],
                **evaluated(evaluate, settings, model, self._entries(), cell.about, _root(settings)),
            }

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        sections = []
        for (model, kind), here in grouped([r for r in results if r["t"]], "model", "schedule").items():
            dense = [result for result in results if result["model"] == model and not result["t"]]
            sections.append(_over_t(str(model), str(kind), here, dense))
        return sections

    def draw(self, results: Sequence[Result], settings: Settings, folder: Path) -> Sequence[Path]:
        paths = []
        for kind in KINDS:
            here = [result for result in results if result["schedule"] in (None, kind)]
            path = folder / f"curves-{kind}.png"
            label = f"t, tokens removed per block ({kind})"
            paths += accuracy_panels(here, path, against="t", x_label=label, by=("model",), faint=_is_released)
        return paths


class Mae(Item):
    name = "mae"
    shows = "table mae"
    about = (
        "Top-1 of MAE's ViT-B, L and H with t tokens removed per block, off the shelf and fine-tuned, without "
        "proportional "
        "attention"
    )
    miniature_about = (
        f"The embedded classifier stands in with t = 16, on {_TEST} test images of Fashion-MNIST; fine-tuned for one "
        f"epoch on {_TRAINING} others, with three seeds."
    )

    def _seeds(self, settings: Settings) -> list[dict[str, int]]:
        """As a part of a cell that is trained."""
        return [{"seed": seed} for seed in range(settings.seeds or (3 if settings.miniature else 1))]

    def _models(self, miniature: bool) -> Sequence[Model]:
        return (replace(_EMBEDDED, ts=(16,)),) if miniature else _MAE

    def needs(self, miniature: bool) -> Sequence[Need]:
        if miniature:
            return [data_need(FASHION)]
        shelf = [Need("weights", model.weights, f"MAE's {model.name}, fine-tuned by its authors") for model in _MAE]
        start = [Need("weights", _pretrained(model), f"MAE's {model.name}, pre-trained") for model in _MAE]
        return [data_need("imagenet"), *shelf, *start]

    def cells(self, settings: Settings) -> Sequence[Cell]:
        data, validation = (FASHION, _TEST) if settings.miniature else _data(settings)
        training = _TRAINING if settings.miniature else 1_281_167
        cells = []
        for model in self._models(settings.miniature):
            for training_kind in (SHELF, TUNED):
                tuned = training_kind == TUNED
                weights = _pretrained(model) if tuned else model.weights
                needs = (data,) if settings.miniature else (data, weights)
                where = {"training": training_kind, "model": model.name}
                epochs = 0 if not tuned else 1 if settings.miniature else _EPOCHS[model.name]
                if not tuned or settings.miniature:  # MAE's authors trained the dense models of the full table
                    for seed in self._seeds(settings) if tuned else ({},):
                        about = {**where, "schedule": None, "method": DENSE, "t": 0, **seed}
                        cells.append(Cell(about, needs, _work(model.size, None, epochs, training, validation)))
                for seed in self._seeds(settings) if tuned else ({},):
                    for kind in KINDS:
                        for entry in EXACT if tuned and not settings.released else _ENTRIES:
                            schedule = schedule_of(kind, model.ts[-1], model.size, entry)
                            about = {**where, "schedule": kind, "method": entry.name, "t": model.ts[-1], **seed}
                            cells.append(Cell(about, needs, _work(model.size, schedule, epochs, training, validation)))
        return cells

    def open(self, settings: Settings) -> RunCell:
        evaluate = Evaluator(settings)
        models = {model.name: model for model in self._models(settings.miniature)}
        entries = tuple(replace(entry, proportional=False) for entry in _ENTRIES)
        folder = settings.run_folder(self.name)
        data = FASHION if settings.miniature else "imagenet"
        root = settings.data[data]
        if settings.miniature:
            root = fashion_subset(root, folder / "data", training=_TRAINING, test=_TEST)

        def run(cell: Cell) -> dict[str, Any]:
            about, model = cell.about, models[cell.about["model"]]
            if about["training"] == SHELF:
                return evaluated(evaluate, settings, model, entries, about, root, data)
            entry = None if about["method"] == DENSE else named(entries, about["method"])
            recipe, choices = str(RECIPE), dict[str, Any](seed=about["seed"])
            if not settings.miniature:
                recipe = "mae"
                choices |= {"model": model.name, "checkpoint": str(settings.weights[_pretrained(model)])}
            budget = {}
            if entry is not None:
                budget = {"schedule": str(schedule_of(about["schedule"], about["t"], model.size, entry))}
            name = "_".join(str(about[key]).replace(" ", "-") for key in ("model", "schedule", "method", "seed"))
            found = fine_tune(settings, recipe, choices, entry, root, folder / name, **budget)
            return {**found, "images": _TEST if settings.miniature else 50_000}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        sections = []
        for (training, model), here in grouped(results, "training", "model").items():
            by_place = grouped(here, "method", "schedule")
            rows = list(dict.fromkeys(str(result["method"]) for result in here if result["method"] != DENSE))

            def measured(row: str, kind: str, places: Any = by_place) -> Value | str | None:
                return over_seeds(places.get((row, kind), []), "top1")

            def expected(row: str, kind: str, key: Any = (training, model)) -> Value | None:
                return printed_value(
                    printed.value("mae", *map(str, key), kind, row.removesuffix(" as released")),
                    printed.IMAGES["imagenet"],
                )

            dense = over_seeds(by_place.get((DENSE, None), []), "top1")
            left = {row: _left(by_place, row) for row in rows}
            counts = "; ".join(f"{row} {found}" for row, found in left.items() if found)
            text = f"top1 (%), dense {dense}. Patch tokens after the last block (constant, linear): {counts}. {_WHY}"
            apart = disagreements(rows, KINDS, measured, expected)
            nothing = unprinted(rows, KINDS, expected)
            text = f"{text}{apart and f' {apart}.'}{nothing and f' {nothing}'}"
            table = beside("method", rows, KINDS, measured, expected)
            sections.append(Section(f"{model}, {training}", table, f"{text}\n\n{reasons(here)}".strip()))
        return sections


_MAE = tuple(replace(model, ts=(printed.table("mae")["t"][model.name],)) for model in _FAMILIES["mae"])
_EPOCHS = {_B: 100, _L: 50, _H: 50}


def _pretrained(model: Model) -> str:
    return model.weights.replace("finetuned", "pretrain")


def _work(size: Size, schedule: Any, epochs: int, training: int, validation: int) -> float:
    """A run that trains evaluates after every epoch."""
    return size.multiply_adds(schedule) * (TRAINING * epochs * training + max(1, epochs) * validation)


def _left(by_place: Any, row: str) -> str:
    found = [by_place.get((row, kind), [{}])[0].get("counts") for kind in KINDS]
    return ", ".join(str(counts[-1]) for counts in found if counts)


def evaluated(
    evaluate: Evaluator,
    settings: Settings,
    model: Model,
    entries: Sequence[Entry],
    about: Any,
    root: Path,
    data: str | None = None,
) -> dict[str, Any]:
    """One cell off the shelf."""
    variant = None
    if about["method"] != DENSE:
        entry = named(entries, about["method"])
        schedule = schedule_of(about["schedule"], about["t"], model.size, entry)
        variant = None if schedule is None else entry.variant(schedule=schedule)
    return evaluate(model.spec(settings), data or _data(settings)[0], root, variant, crop=model.crop)


def _is_released(name: str) -> bool:
    return name.endswith(" as released")


def _over_t(model: str, kind: str, results: Sequence[Result], dense: Sequence[Result]) -> Section:
    by_place = grouped(results, "method", "t")
    rows = list(dict.fromkeys(str(result["method"]) for result in results))
    ts = sorted({result["t"] for result in results})

    def expected(row: str, t: int) -> Value | None:
        if row != "tome" or kind != "constant":
            return None
        return printed_value(printed.value("peers", SHELF, model, str(t)), printed.IMAGES["imagenet"])

    table = beside("method \\ t", rows, ts, lambda row, t: over_seeds(by_place.get((row, t), []), "top1"), expected)
    text = f"top1 (%), dense {over_seeds(dense, 'top1')}. Printed: of ToMe's own paper, where it has the cell. {_WHY}"
    return Section(f"{model}, {kind}", table, text)


ITEMS = (Mae(), Curves("augreg"), Curves("swag"), Curves("mae"))
