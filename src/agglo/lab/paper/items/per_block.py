"""MAE, AugReg and SWAG models with t tokens removed per block: the table of MAE and the curves over t."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agglo.embedded import classifier as embedded
from agglo.lab.paper import classifiers, compare, printed
from agglo.lab.paper.classifiers import ATC, EMBEDDED, SHELF, TUNED, Backbone, ClassifierScale, Entry, FineTuner, named
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.study import Result, RunCell, Section, Settings, Study, StudyCell
from agglo.schedule import Constant, Linear, PerBlock, Schedule

KINDS = ("constant", "linear")
IMAGES = classifiers.IMAGES["imagenet"]
TOME = Entry("tome", "tome")
# The released code counts the class token among those that are left, so that a block removes one fewer.
RELEASED = tuple(Entry(f"{entry.name}{compare.RELEASED}", entry.method, entry.options) for entry in ATC)
_ENTRIES = (TOME, *ATC, *RELEASED)
# MAE's models run without proportional attention, as released, the others with it.
_MAE_ENTRIES = tuple(replace(entry, options={**entry.options, "proportional": False}) for entry in _ENTRIES)
_WHY = (
    "Rows called as released remove t - 1 tokens per block where t is asked for: the released code counts the class "
    "token among those that are left. If the printed rows of ATC were measured so, they had more tokens than ToMe's: "
    "21 instead of 10 at the end of ViT-B with t = 16, linear."
)


def schedule_of(kind: str | None, t: int, subject: Backbone, entry: Entry) -> Schedule | None:
    """Return what a method removes; None if that is nothing.

    ToMe removes at most half of the patches that a block has, as its own code does in silence. ATC leaves at least one.
    Entries of RELEASED remove t - 1 where t is asked for.
    """
    if kind is None:
        return None
    left, removed = subject.patches, []
    for number in (Constant(t) if kind == "constant" else Linear(t)).removals(subject.depth):
        if entry.method == "tome":
            number = min(number, left // 2)
        else:
            number = min(max(number - entry.name.endswith(compare.RELEASED), 0), left - 1)
        left -= number
        removed.append(number)
    return PerBlock(removed) if any(removed) else None


def _subject(name: str, ts: Sequence[int], weights: str = "", **how: Any) -> Backbone:
    return Backbone(name, "imagenet", IMAGES, weights or name, ts=tuple(ts), **how)


def _swag(name: str, ts: Sequence[int], timm_name: str, pixels: int, patch: int, depth: int) -> Backbone:
    normalised = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "input_size": (3, pixels, pixels)}
    options = {"img_size": pixels, "pretrained_cfg_overlay": normalised}
    how: dict[str, Any] = {"patches": (pixels // patch) ** 2, "depth": depth, "crop": 1.0}
    return _subject(name, ts, timm_name=timm_name, options=options, **how)


def _mae(size: str, patch: int, ts: Sequence[int], **how: Any) -> Backbone:
    options, name = {"global_pool": "avg"}, f"vit_{size}_patch{patch}_224.mae"
    return _subject(name, ts, f"mae_finetuned_vit_{size}", options=options, **how)


_FAMILIES = {
    "augreg": (
        _subject("vit_tiny_patch16_224", range(17)),
        _subject("vit_small_patch16_224", range(17)),
        _subject("vit_base_patch16_224", range(17)),
        _subject("vit_large_patch16_224", range(9), depth=24),
        _subject("vit_large_patch16_384", (0, 5, 10, 15, 20, 23), patches=576, depth=24),
    ),
    "swag": (
        _swag("vit_b16_in1k_384", range(0, 46, 5), "vit_base_patch16_224", 384, 16, 12),
        _swag("vit_l16_in1k_512", range(0, 41, 5), "vit_large_patch16_224", 512, 16, 24),
        _swag("vit_h14_in1k_518", range(0, 41, 5), "vit_huge_patch14_224", 518, 14, 32),
    ),
    "mae": (
        _mae("base", 16, range(17)),
        _mae("large", 16, range(9), depth=24),
        _mae("huge", 14, range(8), patches=256, depth=32),
    ),
}
_CURVE = replace(EMBEDDED, images=500, bundled=True, ts=(0, 4, 8, 12, 16))
_ENLARGED = replace(_CURVE, model=f"{embedded.NAME} at 42 pixels", patches=441, ts=(0, 18, 36), image_size=42)


def _schedule(scale: ClassifierScale, about: Mapping[str, Any]) -> Schedule | None:
    """Return what a cell removes; None is the dense model."""
    entry = named(scale.entries, about["method"])
    return None if entry is None else schedule_of(about["schedule"], about["t"], scale.subject(about), entry)


def _evaluating(scale: ClassifierScale, settings: Settings, root: Path | None = None) -> RunCell:
    evaluate = classifiers.Evaluator(settings)

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        entry, schedule = named(scale.entries, about["method"]), _schedule(scale, about)
        config = None if entry is None or schedule is None else entry.config(schedule=schedule)
        return evaluate(scale.subject(about), config, root)

    return run


def _curve_axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    for subject in scale.subjects:
        for t in subject.ts:
            for kind in KINDS if t else (None,):
                for name in [entry.name for entry in scale.entries] if t else [DENSE]:
                    about = {"model": subject.model, "schedule": kind, "method": name, "t": t}
                    yield StudyCell(about, subject.needs)


def _run_curve(scale: ClassifierScale, settings: Settings) -> RunCell:
    evaluate = _evaluating(scale, settings)
    return lambda about: {"data": scale.subject(about).data, **evaluate(about)}


def _curve_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (model, kind), here in compare.grouped([r for r in results if r["t"]], "model", "schedule").items():
        dense = compare.dense_value([result for result in results if result["model"] == model], "top1")

        def expected(row: str, t: int, model: str = model, kind: str = kind) -> compare.Value | None:
            is_printed = (row, kind) == ("tome", "constant")
            return compare.printed_value("peers", SHELF, model, str(t), images=IMAGES) if is_printed else None

        found = compare.by_method(here, "t", "top1", expected=expected)
        text = f"top1 (%), dense {dense}. Printed: of ToMe's own paper, where it has the cell. {_WHY}"
        table = replace(found, columns=found.columns[::-1]).table(str, "method \\ t")
        sections.append(Section(f"{model}, {kind}", table, text))
    return sections


def _draw_curves(results: Sequence[Result], scale: ClassifierScale, settings: Settings, folder: Path) -> list[Path]:
    paths = []
    for kind in KINDS:
        here = compare.grouped([result for result in results if result["schedule"] in (None, kind)], "model").items()
        how: dict[str, Any] = {"over": "t", "x_label": f"t, tokens removed per block ({kind})"}
        how["faint"] = lambda name: name.endswith(compare.RELEASED)
        panels = [each for (model,), of in here for each in compare.panel(of, "top1", model, **how)]
        paths += compare.draw_panels(panels, folder / f"curves-{kind}.png")
    return paths


def _curves(family: str, title: str, gpu_hours: str) -> Study:
    entries = _MAE_ENTRIES if family == "mae" else _ENTRIES
    enlarged = "; images are enlarged to 42 pixels, 441 tokens" if family == "swag" else ""
    return Study(
        name=f"curves-{family}",
        shows=f"figure ots_{family}",
        about=f"Top-1 of {title} models off the shelf over t, the tokens removed per block, constant and "
        f"linearly falling, with{'out' if family == 'mae' else ''} proportional attention; no numbers are printed",
        stands_in=f"The embedded classifier stands in for {title}, and {_CURVE.images} of the images that "
        f"come with it for ImageNet{enlarged}.",
        gpu_hours=gpu_hours,
        full=ClassifierScale(_FAMILIES[family], entries),
        miniature=ClassifierScale((_ENLARGED if family == "swag" else _CURVE,), entries),
        axes=_curve_axes,
        run=_run_curve,
        table=_curve_table,
        draw=_draw_curves,
    )


def _pretrained(subject: Backbone) -> Backbone:
    """Return the model that fine-tuning starts from."""
    return replace(subject, weights=subject.weights.replace("finetuned", "pretrain"))


def _mae_axes(scale: ClassifierScale, settings: Settings) -> Iterator[StudyCell]:
    names = [entry.name for entry in scale.entries]
    for subject in scale.subjects:
        about = {"model": subject.model, "schedule": None, "method": DENSE, "t": 0}
        reduced = [{**about, "schedule": k, "method": n, "t": subject.ts[-1]} for k in KINDS for n in names]
        for each in (about, *reduced):
            yield StudyCell({"training": SHELF, **each}, subject.needs)
        tuned = [each for each in reduced if not str(each["method"]).endswith(compare.RELEASED)]
        # MAE's authors trained the dense models of the full table.
        for each in [*([about] if settings.miniature else []), *tuned]:
            for seed in range(settings.seeds or scale.seeds):
                yield StudyCell({"training": TUNED, **each, "seed": seed}, _pretrained(subject).needs)


def _run_mae(scale: ClassifierScale, settings: Settings) -> RunCell:
    train = FineTuner("mae", scale, settings)
    evaluate = _evaluating(scale, settings, train.roots[scale.subjects[0].data])

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        if about["training"] == SHELF:
            return evaluate(about)
        budget = {"schedule": str(_schedule(scale, about))}
        return train(about, budget, weights=_pretrained(scale.subject(about)).weights)

    return run


def _mae_table(results: Sequence[Result], scale: ClassifierScale) -> list[Section]:
    sections = []
    for (training, model), here in compare.grouped(results, "training", "model").items():

        def expected(row: str, kind: str, key: tuple[str, str] = (training, model)) -> compare.Value | None:
            return compare.printed_value("mae", *key, kind, row.removesuffix(compare.RELEASED), images=IMAGES)

        found = compare.by_method([r for r in here if r["schedule"]], "schedule", "top1", expected=expected)
        found = replace(found, columns=KINDS)
        groups = compare.grouped(here, "method", "schedule")
        left = {row: [groups.get((row, kind), [{}])[0].get("counts") for kind in KINDS] for row in found.rows}
        counts = "; ".join(f"{row} {', '.join(str(c[-1]) for c in of if c)}" for row, of in left.items() if any(of))
        text = (
            f"top1 (%), dense {compare.dense_value(here, 'top1')}. Patch tokens after the last block (constant, "
            f"linear): {counts}. {_WHY} {found.remarks()}\n\n{compare.reasons(here)}"
        )
        sections.append(Section(f"{model}, {training}", found.table(str), text.strip()))
    return sections


MAE = Study(
    name="mae",
    shows="table mae",
    about="Top-1 of MAE's ViT-B, L and H with t tokens removed per block, off the shelf and fine-tuned, without "
    "proportional attention",
    stands_in="The embedded classifier stands in with t = 16, on 2000 test images of Fashion-MNIST; fine-tuned for one "
    "epoch on 3000 others, with three seeds.",
    gpu_hours="5,339",
    full=ClassifierScale(
        tuple(replace(subject, ts=(printed.table("mae")["t"][subject.model],)) for subject in _FAMILIES["mae"]),
        _MAE_ENTRIES,
        recipe="mae",
    ),
    miniature=ClassifierScale(
        (replace(EMBEDDED, training=3000, images=2000, ts=(16,)),), _MAE_ENTRIES, recipe=classifiers.RECIPE, seeds=3
    ),
    axes=_mae_axes,
    run=_run_mae,
    table=_mae_table,
)
ITEMS = (MAE, _curves("augreg", "AugReg", "24"), _curves("swag", "SWAG", "153"), _curves("mae", "MAE", "28"))
