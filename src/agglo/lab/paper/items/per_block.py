"""MAE, AugReg and SWAG models with t tokens removed per block: the table of MAE and the curves over t."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agglo.config import ReductionConfig
from agglo.embedded import classifier as embedded
from agglo.lab.paper import printed
from agglo.lab.paper.classifiers import (
    ATC,
    DENSE,
    EMBEDDED,
    IMAGES,
    RECIPE,
    ClassifierScale,
    Entry,
    Evaluator,
    Subject,
    fine_tune,
)
from agglo.lab.paper.compare import (
    Value,
    accuracy_panels,
    beside,
    by_method,
    dense_of,
    grouped,
    printed_value,
    reasons,
    remarks,
)
from agglo.lab.paper.estimates import BASE, HUGE, LARGE, SMALL, TINY, TRAINING, Size
from agglo.lab.paper.study import Cell, Result, RunCell, Section, Settings, Study
from agglo.schedule import Constant, Linear, PerBlock, Schedule

SHELF, TUNED = "off the shelf", "fine-tuned"
KINDS = ("constant", "linear")
# The released code counts the class token among those that are left, so that a block removes one fewer.
ONE_FEWER = " as released"
TOME = Entry("tome", "tome")
RELEASED = tuple(Entry(f"{entry.name}{ONE_FEWER}", entry.method, entry.options) for entry in ATC)
_ENTRIES = (TOME, *ATC, *RELEASED)
# MAE's models run without proportional attention, as released, the others with it.
_MAE_ENTRIES = tuple(replace(entry, options={**entry.options, "proportional": False}) for entry in _ENTRIES)
_WHY = (
    "Rows called as released remove t - 1 tokens per block where t is asked for: the released code counts the class "
    "token among those that are left. If the printed rows of ATC were measured so, they had more tokens than ToMe's: "
    "21 instead of 10 at the end of ViT-B with t = 16, linear."
)


def schedule_of(kind: str | None, t: int, size: Size, entry: Entry) -> Schedule | None:
    """Return what a method removes; None if that is nothing.

    ToMe removes at most half of the patches that a block has, as its own code does in silence. ATC leaves at least one.
    Entries of RELEASED remove t - 1 where t is asked for.
    """
    if kind is None:
        return None
    left, removed = size.patches, []
    for number in (Constant(t) if kind == "constant" else Linear(t)).removals(size.depth):
        if entry.method == "tome":
            number = min(number, left // 2)
        else:
            number = min(max(number - entry.name.endswith(ONE_FEWER), 0), left - 1)
        left -= number
        removed.append(number)
    return PerBlock(removed) if any(removed) else None


def _subject(name: str, size: Size, ts: tuple[int, ...], weights: str = "", **how: Any) -> Subject:
    return Subject(name, size, "imagenet", *IMAGES["imagenet"], weights or name, ts=ts, **how)


def _swag(name: str, size: Size, ts: tuple[int, ...], timm_name: str, pixels: int) -> Subject:
    normalised = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "input_size": (3, pixels, pixels)}
    options = {"img_size": pixels, "pretrained_cfg_overlay": normalised}
    size = replace(size, patches=(pixels // (14 if timm_name.startswith("vit_huge") else 16)) ** 2)
    return _subject(name, size, ts, timm_name=timm_name, options=options, crop=1.0)


def _mae(name: str, size: Size, ts: tuple[int, ...], weights: str) -> Subject:
    return _subject(name, size, ts, f"mae_finetuned_{weights}", options={"global_pool": "avg"})


_MAE = (
    _mae("vit_base_patch16_224.mae", BASE, tuple(range(17)), "vit_base"),
    _mae("vit_large_patch16_224.mae", LARGE, tuple(range(9)), "vit_large"),
    _mae("vit_huge_patch14_224.mae", HUGE, tuple(range(8)), "vit_huge"),
)
_EPOCHS = {"vit_base_patch16_224.mae": 100, "vit_large_patch16_224.mae": 50, "vit_huge_patch14_224.mae": 50}
_FAMILIES = {
    "augreg": (
        _subject("vit_tiny_patch16_224", TINY, tuple(range(17))),
        _subject("vit_small_patch16_224", SMALL, tuple(range(17))),
        _subject("vit_base_patch16_224", BASE, tuple(range(17))),
        _subject("vit_large_patch16_224", LARGE, tuple(range(9))),
        _subject("vit_large_patch16_384", replace(LARGE, patches=576), (0, 5, 10, 15, 20, 23)),
    ),
    "swag": (
        _swag("vit_b16_in1k_384", BASE, tuple(range(0, 46, 5)), "vit_base_patch16_224", 384),
        _swag("vit_l16_in1k_512", LARGE, tuple(range(0, 41, 5)), "vit_large_patch16_224", 512),
        _swag("vit_h14_in1k_518", HUGE, tuple(range(0, 41, 5)), "vit_huge_patch14_224", 518),
    ),
    "mae": _MAE,
}
_TITLES = {"augreg": "AugReg", "swag": "SWAG", "mae": "MAE"}
_CURVE = replace(EMBEDDED, images=500, bundled=True, ts=(0, 4, 8, 12, 16))
_ENLARGED = replace(
    _CURVE, model=f"{embedded.NAME} at 42 pixels", size=replace(_CURVE.size, patches=441), ts=(0, 18, 36), image_size=42
)


def _config(scale: ClassifierScale, about: Mapping[str, Any]) -> ReductionConfig | None:
    if about["method"] == DENSE:
        return None
    entry = scale.entry(about)
    assert entry is not None
    schedule = schedule_of(about["schedule"], about["t"], scale.subject(about).size, entry)
    return None if schedule is None else entry.config(schedule=schedule)


def _curve_axes(scale: ClassifierScale, settings: Settings) -> Iterator[Cell]:
    for subject in scale.subjects:
        for t in subject.ts:
            for kind in KINDS if t else (None,):
                for entry in scale.entries if t else (Entry(DENSE, "none"),):
                    about = {"model": subject.model, "schedule": kind, "method": entry.name, "t": t}
                    cost = subject.size.multiply_adds(schedule_of(kind, t, subject.size, entry))
                    yield Cell(about, subject.needs, subject.images * cost)


def _run_curve(scale: ClassifierScale, settings: Settings) -> RunCell:
    evaluate = Evaluator(settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        subject = scale.subject(about)
        return {"data": subject.data, **evaluate(subject, _config(scale, about))}

    return run


def _curve_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (model, kind), here in grouped([r for r in results if r["t"]], "model", "schedule").items():
        dense = dense_of([result for result in results if result["model"] == model], "top1")
        rows, ts, measured = by_method(here, "t", "top1")

        def expected(row: str, t: int, model: str = model, kind: str = kind) -> Value | None:
            known = row == "tome" and kind == "constant"
            number = printed.value("peers", SHELF, model, str(t)) if known else None
            return printed_value(number, printed.IMAGES["imagenet"])

        table = beside(rows, ts[::-1], measured, expected, str, title="method \\ t")
        text = f"top1 (%), dense {dense}. Printed: of ToMe's own paper, where it has the cell. {_WHY}"
        sections.append(Section(f"{model}, {kind}", table, text))
    return sections


def _draw_curves(results: Sequence[Result], scale: ClassifierScale, settings: Settings, folder: Path) -> list[Path]:
    paths = []
    for kind in KINDS:
        here = [result for result in results if result["schedule"] in (None, kind)]
        how: dict[str, Any] = {"over": "t", "x_label": f"t, tokens removed per block ({kind})", "by": ("model",)}
        path = folder / f"curves-{kind}.png"
        paths += accuracy_panels(here, path, faint=lambda name: name.endswith(ONE_FEWER), **how)
    return paths


def _curves(family: str) -> Study:
    entries = _MAE_ENTRIES if family == "mae" else _ENTRIES
    enlarged = "; pictures are enlarged to 42 pixels, 441 tokens" if family == "swag" else ""
    return Study(
        name=f"curves-{family}",
        shows=f"figure ots_{family}",
        about=f"Top-1 of {_TITLES[family]} models off the shelf over t, the tokens removed per block, constant and "
        f"linearly falling, with{'out' if family == 'mae' else ''} proportional attention; no numbers are printed",
        stands_in=f"The embedded classifier stands in for {_TITLES[family]}, and {_CURVE.images} of the images that "
        f"come with it for ImageNet{enlarged}.",
        full=ClassifierScale(_FAMILIES[family], entries),
        miniature=ClassifierScale((_ENLARGED if family == "swag" else _CURVE,), entries),
        axes=_curve_axes,
        run=_run_curve,
        table=_curve_table,
        draw=_draw_curves,
    )


def _pretrained(subject: Subject) -> Subject:
    """Return the model that fine-tuning starts from."""
    return replace(subject, weights=subject.weights.replace("finetuned", "pretrain"))


def _mae_axes(scale: ClassifierScale, settings: Settings) -> Iterator[Cell]:
    for subject in scale.subjects:
        for training in (SHELF, TUNED):
            tuned = training == TUNED
            start = _pretrained(subject) if tuned else subject
            seeds = [{"seed": seed} for seed in range(settings.seeds or scale.seeds)] if tuned else [{}]
            entries = [e for e in scale.entries if not tuned or settings.released or not e.name.endswith(ONE_FEWER)]
            places = [(seed, kind, entry) for seed in seeds for kind in KINDS for entry in entries]
            if not tuned or settings.miniature:  # MAE's authors trained the dense models of the full table
                places = [*((seed, None, Entry(DENSE, "none")) for seed in seeds), *places]  # type: ignore[list-item]
            epochs = _EPOCHS.get(subject.model, 1) if tuned else 0  # each followed by an evaluation
            passes = TRAINING * epochs * subject.training + max(1, epochs) * subject.images
            for seed, kind, entry in places:
                t = 0 if entry.name == DENSE else subject.ts[-1]
                about = {"training": training, "model": subject.model, "schedule": kind, "method": entry.name, "t": t}
                cost = subject.size.multiply_adds(schedule_of(kind, t, subject.size, entry))
                yield Cell({**about, **seed}, start.needs, passes * cost)


def _run_mae(scale: ClassifierScale, settings: Settings) -> RunCell:
    evaluate, folder = Evaluator(settings), settings.run_folder("mae")
    root = scale.subjects[0].training_root(settings, folder)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        subject, entry = scale.subject(about), scale.entry(about)
        if about["training"] == SHELF:
            return evaluate(subject, _config(scale, about), root=root)
        choices = {"seed": about["seed"], **_pretrained(subject).start(settings)}
        budget = {}
        if entry is not None:
            budget = {"schedule": str(schedule_of(about["schedule"], about["t"], subject.size, entry))}
        name = "_".join(str(about[key]).replace(" ", "-") for key in ("model", "schedule", "method", "seed"))
        found = fine_tune(settings, scale.recipe, choices, entry, root, folder / name, **budget)
        return {**found, "images": subject.images}

    return run


def _mae_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (training, model), here in grouped(results, "training", "model").items():
        rows, _, measured = by_method([r for r in here if r["schedule"]], "schedule", "top1")
        groups = grouped(here, "method", "schedule")

        def expected(row: str, kind: str, key: tuple[str, str] = (training, model)) -> Value | None:
            number = printed.value("mae", *key, kind, row.removesuffix(ONE_FEWER))
            return printed_value(number, printed.IMAGES["imagenet"])

        def left(row: str, groups: Any = groups) -> str:
            counts = [groups.get((row, kind), [{}])[0].get("counts") for kind in KINDS]
            return ", ".join(str(each[-1]) for each in counts if each)

        counts = "; ".join(f"{row} {left(row)}" for row in rows if left(row))
        text = (
            f"top1 (%), dense {dense_of(here, 'top1')}. Patch tokens after the last block (constant, linear): "
            f"{counts}. {_WHY}{remarks(rows, KINDS, measured, expected)}\n\n{reasons(here)}"
        )
        sections.append(Section(f"{model}, {training}", beside(rows, KINDS, measured, expected, str), text.strip()))
    return sections


MAE = Study(
    name="mae",
    shows="table mae",
    about="Top-1 of MAE's ViT-B, L and H with t tokens removed per block, off the shelf and fine-tuned, without "
    "proportional attention",
    stands_in="The embedded classifier stands in with t = 16, on 2000 test images of Fashion-MNIST; fine-tuned for one "
    "epoch on 3000 others, with three seeds.",
    full=ClassifierScale(
        tuple(replace(subject, ts=(printed.table("mae")["t"][subject.model],)) for subject in _MAE),
        _MAE_ENTRIES,
        recipe="mae",
    ),
    miniature=ClassifierScale(
        (replace(EMBEDDED, training=3000, images=2000, ts=(16,)),), _MAE_ENTRIES, recipe=str(RECIPE), seeds=3
    ),
    axes=_mae_axes,
    run=_run_mae,
    table=_mae_table,
)
ITEMS = (MAE, *map(_curves, _FAMILIES))
