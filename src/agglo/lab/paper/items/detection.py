"""AP of detectors with fewer tokens, off the shelf and fine-tuned: the paper's two tables of COCO.

The AP of every resample of the images is kept for each cell, from which intervals of any difference between two cells
are drawn: the r-th resample has the same images in every cell. Differences are measured of each method to dense, and of
what the paper's tables say of which method is ahead of which.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agglo.config import ReductionConfig
from agglo.lab.evaluation.grid import Reducible, one_of_several
from agglo.lab.paper import compare, printed
from agglo.lab.paper.classifiers import ALL, FASHION, RATES, SHELF, TUNED, Entry, data_need, named, training_choices
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.output import read_results
from agglo.lab.paper.study import CannotRunError, Need, Result, RunCell, Section, Settings, Study, StudyCell
from agglo.lab.tasks.detection.data import make_scenes, open_coco, transforms_for
from agglo.lab.tasks.detection.evaluation.average_precision import KINDS, DetectionBatches, evaluate
from agglo.lab.tasks.detection.evaluation.bootstrap import bootstrap, interval
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.lab.tasks.detection.training.settings import RECIPES, DetectionSettings
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.models.checkpoints import fingerprint, read_checkpoint
from agglo.patch import apply
from agglo.schedule import Counts
from agglo.utils.files import replacing
from agglo.utils.journal import key_of
from agglo.utils.tables import Column, Table

COCO = "coco2017"
ASKING = ("evit", "topk", "ats", "evovit")  # what the class token attends to
DENSE_WITH_TOKEN = "dense with class token"
COLLAPSED = Entry("one token", "atc", {"linkage": "average"})  # with a single token, all methods that merge are one
BOX_AND_MASK = tuple(KINDS.values())

_SAMPLES = "resamples.npz"


def entries(*names: str) -> tuple[Entry, ...]:
    return tuple(entry for name in names for entry in ALL if entry.name == name)


@dataclass(frozen=True)
class DetectorScale:
    """Models, methods, keep rates and trainings of a study of detectors.

    In miniature every detector has a class token, so that one detector serves all methods, and the dense detector is
    trained on as long as the methods are. In full there is a second dense detector for the methods that need a class
    token.
    """

    models: tuple[str, ...]
    data: str
    methods: tuple[Entry, ...]  # off the shelf come those that learn nothing
    shelf_rates: tuple[float, ...] = RATES  # keep rates, the most telling first
    tuned_rates: tuple[float, ...] = RATES
    shelf_seeds: int = 1
    dense: tuple[str, Mapping[str, Any]] = ("dense", {})  # recipe and choices of training
    tuned: tuple[str, Mapping[str, Any]] = ("finetune", {})
    validation: int = 1000  # scenes, in miniature
    resamples: int = 200
    batch_size: int = 1
    workers: int = 2

    @property
    def is_miniature(self) -> bool:
        return self.data == FASHION

    @property
    def reduced(self) -> list[tuple[str, float, Entry]]:
        """Every training, keep rate and method; off the shelf, DPC-KNN has equal weights in place of learned ones."""
        shelf = [(SHELF, rate, each) for rate in self.shelf_rates for each in self.methods if not each.learns]
        tuned = [(TUNED, rate, each) for rate in self.tuned_rates for each in self.methods]
        return shelf + [case for case in tuned if case[2].name != "dpc_knn equal"]

    def asks(self, name: str) -> bool:
        """Return whether a method or dense detector needs a dense detector of its own, with a class token."""
        entry = named(self.methods, name)
        return not self.is_miniature and (name == DENSE_WITH_TOKEN or (entry is not None and entry.method in ASKING))

    def dense_name(self, name: str) -> str:
        """Return the dense detector that a method is reduced from."""
        return DENSE_WITH_TOKEN if self.asks(name) else DENSE

    def training(self, about: Mapping[str, Any], checkpoint: Path | None, *, dense: bool = False) -> DetectionSettings:
        """Return the settings of a cell's training, or of that of the dense detector that it starts from.

        Of a dense cell the detector is trained on like the methods. The miniature's dense one starts from the embedded
        classifier.
        """
        entry = None if dense else named(self.methods, about["method"])
        recipe, chosen = self.dense if dense else self.tuned
        choices: dict[str, Any] = {"model": about["model"], "seed": about["seed"], **chosen}
        choices["class_token"] = self.is_miniature or self.asks(about["method"])
        if checkpoint is not None:
            choices["checkpoint"] = str(checkpoint)
        if not dense:
            choices |= training_choices(entry)
        if entry is not None:
            choices["keep_rate"] = about["keep_rate"]
        return RECIPES.load(recipe).resolve(choices)[0]


_PAPER = entries("atc average", "atc complete", "atc single", "tome")
_PRUNING = entries("evit", "ats", "evovit", "svit", "dynamicvit", "dynamicvit_prsv")
# Not in the paper's tables of detectors.
_FURTHER = entries("pool", "random", "kmedoids", "dpc_knn equal", "dpc_knn", "topk")
FULL = DetectorScale(("tiny", "small"), COCO, (*_PAPER, *_PRUNING))
_SHORT = {"epochs": 1, "lr_drops": [2 / 3], "evaluate_every": 1, "validation_scenes": 20}  # the item judges by itself
MINIATURE = DetectorScale(
    ("miniature",),
    FASHION,
    (*_PAPER, *_FURTHER, *_PRUNING),
    shelf_rates=(0.5, 0.25, 0.7, 0.9),
    tuned_rates=(0.5,),
    shelf_seeds=2,
    dense=("miniature", {}),
    # A fifth of the rate that the dense detector starts with, and one drop.
    tuned=("miniature", {"scenes": 800, "lr": 1e-4, "warmup_steps": 20, **_SHORT}),
    resamples=500,
    batch_size=8,
)


def published(model: str) -> str:
    """Return what weights of a dense detector are called, trained by others or by an earlier run."""
    return f"vit_adapter_{model}"


def start(model: str) -> str:
    """Return what weights are called that a dense detector starts from."""
    return f"deit_{model}_patch16_224"


class Judge:
    """Trains what is missing and evaluates one cell after the other."""

    def __init__(self, settings: Settings, scale: DetectorScale, item: str) -> None:
        self.settings, self.scale, self.item = settings, scale, item
        self.trained: set[Path] = set()
        self.opened_images = cache(self.images)
        accelerator = one_of_several(settings.device)
        self.is_main = accelerator is None or accelerator.is_main_process

    def __call__(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return AP, tokens left and GFLOPs of a cell; its resamples go into its folder."""
        entry = named((COLLAPSED, *self.scale.methods), about["method"])
        dense = self.dense_weights(about)
        config = reachable_config(opened(dense), entry, about["keep_rate"])
        folder, weights = self.folder(about), dense
        if about["training"] == TUNED:
            weights = self.train(self.scale.training(about, dense), folder / "run")
        detector = opened(weights)
        images, resamples = self.opened_images(detector.spec.image_size), self.scale.resamples
        found = judged(detector, config, images, folder, self.settings, resamples)
        found["weights_with_token" if self.scale.asks(about["method"]) else "weights"] = _fingerprint(dense)
        if self.is_main:
            resampled = samples_in(folder)
            found |= {f"{kind}_error": float(np.nanstd(resampled[kind], ddof=1)) for kind in BOX_AND_MASK}
        return found

    def images(self, side: int | None) -> DetectionBatches:
        """Return the validation images, the same ones for every cell, resized to squares; None is the paper's way."""
        root, scale, transform = self.settings.data[self.scale.data], self.scale, transforms_for(side)[1]
        size = self.settings.batch_size or scale.batch_size
        if scale.is_miniature:
            return HeldImages(make_scenes(root, scale.validation, 0, "val"), transform, batch_size=size)
        how: dict[str, Any] = {"accelerator": one_of_several(self.settings.device), "workers": scale.workers}
        return DetectionBatches(open_coco(root, "val"), transform, batch_size=size, **how)

    def dense_weights(self, about: Mapping[str, Any]) -> Path:
        """Return the weights that were given, or those of a training that goes on where it was stopped."""
        model, name = about["model"], self.scale.dense_name(about["method"])
        if name == DENSE and (given := self.settings.weights.get(published(model))):
            return given
        checkpoint = None if self.scale.is_miniature else self.settings.weights[start(model)]
        run = self.settings.run_folder(self.item, model, f"seed{about['seed']}", name.replace(" ", "-"))
        return self.train(self.scale.training({**about, "method": name}, checkpoint, dense=True), run)

    def train(self, chosen: DetectionSettings, run: Path) -> Path:
        """Return the last weights of a training, not the best, so that validation images choose nothing."""
        if run not in self.trained:
            train_detector(chosen, self.settings.data[self.scale.data], run, cpu=self.settings.device == "cpu")
            self.trained.add(run)
        return run / "last" / "model.safetensors"

    def folder(self, about: Mapping[str, Any]) -> Path:
        """Return the folder of a cell's resamples and of its training."""
        names = [about["model"], f"seed{about['seed']}", about["training"], about["method"], f"{about['keep_rate']}"]
        return self.settings.run_folder(self.item, *(name.replace(" ", "-") for name in names))


def reachable_config(detector: Opened, entry: Entry | None, rate: float | None) -> ReductionConfig | None:
    """Return an entry's reduction at a keep rate; without one, all tokens collapse to one in the first block.

    Raises:
        CannotRunError: ToMe cannot leave so few tokens; what any other method refuses is a mistake of the study.
    """
    if entry is None:
        return None
    config = entry.config(schedule=Counts((1,), blocks=(0,))) if rate is None else entry.config(rate)
    try:
        apply(detector.model, config)
    except ValueError as error:
        if entry.method != "tome":
            raise
        raise CannotRunError(str(error)) from error
    return config


def judged(
    detector: Opened,
    config: ReductionConfig | None,
    images: DetectionBatches,
    folder: Path,
    settings: Settings,
    resamples: int,
) -> dict[str, Any]:
    """Return AP, tokens left and GFLOPs of a reduced detector; its AP on resampled images goes into a folder."""

    def keep(results: list[dict[str, Any]]) -> None:
        truth = images.data.ground_truth
        found = {name: 100 * bootstrap(truth, results, kind, resamples=resamples) for kind, name in KINDS.items()}
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / _SAMPLES) as unfinished, unfinished.open("wb") as file:
            np.savez(file, **found)  # type: ignore[arg-type]

    reducible = Reducible(detector.model, detector.learned, f"checkpoint {detector.weights}")
    [about] = reducible.cells({} if config is None else {config: config.method}, dense=config is None)
    reducible.apply(config)
    accelerator = one_of_several(settings.device)
    detector.model.to(settings.device if accelerator is None else accelerator.device)
    found = evaluate(detector.model, images, accelerator=accelerator, keep=keep)
    names = [f"{kind}_{name}" for kind in BOX_AND_MASK for name in ("AP", "AP50", "AP75")]
    counted = {"tokens": about.about["counts"][-1], "gflops": about.about["gflops"], "images": found["images"]}
    return {**{name: found[name] for name in names}, **counted}


def is_kept(folder: Path) -> bool:
    """Return whether the resamples are there."""
    return (folder / _SAMPLES).is_file()


def samples_in(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Return AP in percent of every resample of the images, by "box" and "mask"."""
    with np.load(folder / _SAMPLES) as arrays:
        return {name: arrays[name] for name in BOX_AND_MASK}


@lru_cache(maxsize=8)
def _fingerprint(weights: Path) -> str:
    return fingerprint(read_checkpoint(weights))


@lru_cache(maxsize=1)
def opened(weights: Path) -> Opened:
    return open_detector(str(weights))


class HeldImages(DetectionBatches):
    """Images that are prepared once: every cell looks at the same ones."""

    @cached_property
    def _held(self) -> Sequence[Any]:
        return list(super().__iter__())

    def __iter__(self) -> Any:
        return iter(self._held)


GATE = "gate"  # of cells with a single token: a detector that then loses little hardly needs the ViT
_UNREDUCED = (DENSE, DENSE_WITH_TOKEN, COLLAPSED.name)

Case = tuple[str, str, float | None]  # training, method, keep rate


class Difference(NamedTuple):
    """AP of one case minus that of another, which is measured with its interval."""

    name: str
    first: Case
    second: Case


def ahead(training: str, better: str, worse: str, rate: float) -> Difference:
    name = f"{training} at {rate:.0%}: {better} ahead of {worse}"
    return Difference(name, (training, better, rate), (training, worse, rate))


# Above 0 in the paper's table for both of its detectors, for boxes and for masks.
CLAIMS = tuple(
    ahead(*case)
    for case in (
        (SHELF, "atc average", "tome", 0.5),
        (SHELF, "atc complete", "tome", 0.5),
        (SHELF, "tome", "atc single", 0.5),
        (SHELF, "atc average", "atc single", 0.5),
        (SHELF, "atc average", "atc single", 0.25),
        (SHELF, "atc complete", "atc average", 0.25),
        (TUNED, "atc average", "tome", 0.5),
        (TUNED, "atc complete", "tome", 0.5),
        (TUNED, "atc average", "atc single", 0.5),
        (TUNED, "atc average", "atc single", 0.25),
    )
)
# Against what the paper's tables do not have at these keep rates.
_OTHERS = [(t, r, other) for t in (SHELF, TUNED) for r in (0.25, 0.5) for other in ("pool", "random", "evit")]
FURTHER = tuple(ahead(training, "atc average", other, rate) for training, rate, other in _OTHERS)


def to_dense(training: str, method: str, rate: float) -> str:
    return f"{training}: {method} {rate:.0%} to dense"


def differences_of(scale: DetectorScale) -> list[Difference]:
    """Return all differences that a scale has the cells for.

    In full the dense detector is not trained on: the fine-tuned ones are compared with it as it is.
    """
    found = []
    for training, rate, entry in scale.reduced:
        dense = (training if scale.is_miniature else SHELF, scale.dense_name(entry.name), None)
        found.append(Difference(to_dense(training, entry.name, rate), (training, entry.name, rate), dense))
    known = [each.first for each in found]
    return found + [each for each in (*CLAIMS, *FURTHER) if each.first in known and each.second in known]


def _axes(scale: DetectorScale, settings: Settings) -> Iterator[StudyCell]:
    seeds = {SHELF: settings.seeds or scale.shelf_seeds, TUNED: settings.seeds or 1}
    dense = dict.fromkeys([DENSE, *(scale.dense_name(entry.name) for entry in scale.methods)])
    cases: list[tuple[str, str, float | None]] = [(SHELF, name, None) for name in dense]
    if scale.is_miniature:
        cases += [(GATE, COLLAPSED.name, None), (TUNED, DENSE, None)]
    cases += [(training, entry.name, rate) for training, rate, entry in scale.reduced]
    for model in scale.models:
        for training, method, rate in cases:
            for seed in range(seeds[TUNED if training == TUNED else SHELF]):
                about = {"model": model, "training": training, "method": method, "keep_rate": rate, "seed": seed}
                yield StudyCell(about, _needs(settings, scale, model, [method]))
        for name, *pair in differences_of(scale):
            compared = min(seeds[training] for training, *_ in pair)
            needs = _needs(settings, scale, model, [method for _, method, _ in pair])
            yield StudyCell({"model": model, "difference": name, "seeds": list(range(compared))}, needs)


def _published(model: str) -> Need:
    return Need("weights", published(model), f"the dense detector {model}, in place of training it")


def _needs(settings: Settings, scale: DetectorScale, model: str, methods: Sequence[str]) -> tuple[Need, ...]:
    """Return data, and a dense detector or what one is trained from."""
    if scale.is_miniature:
        return (data_need(FASHION),)
    found = [Need("data", COCO, "COCO 2017: train2017, val2017, annotations")]
    is_given, asking = published(model) in settings.weights, [scale.asks(method) for method in methods]
    found += [Need("weights", start(model), f"DeiT {model}")] if not is_given or any(asking) else []
    return (*found, _published(model)) if is_given and not all(asking) else tuple(found)


def _run(scale: DetectorScale, settings: Settings) -> RunCell:
    judge = Judge(settings, scale, "detection")
    pairs = {name: pair for name, *pair in differences_of(scale)}
    return lambda about: (
        _difference(judge, pairs[about["difference"]], about) if "difference" in about else judge(about)
    )


def _difference(judge: Judge, pair: Sequence[Case], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by "box" and "mask", a difference of means over seeds with its 95 % interval over resampled images.

    A cell whose resamples are gone is evaluated again.
    """
    done = {key_of(result["cell"]): result for result in read_results(judge.settings.folder(judge.item))}
    where = [dict(zip(("training", "method", "keep_rate"), case, strict=True)) for case in pair]
    cells = [[{"model": about["model"], **case, "seed": seed} for case in where] for seed in about["seeds"]]
    for cell in chain(*cells):
        if "cannot" in (result := done[key_of(cell)]):
            raise CannotRunError(result["cannot"])
        if not is_kept(judge.folder(cell)):
            print(f"agglo: the resamples of {cell} are gone; evaluated again", file=sys.stderr)
            judge(cell)
    found = {}
    for kind in BOX_AND_MASK if judge.is_main else ():
        values = [done[key_of(a)][f"{kind}_AP"] - done[key_of(b)][f"{kind}_AP"] for a, b in cells]
        samples = [np.subtract(*(samples_in(judge.folder(cell))[kind] for cell in both)) for both in cells]
        low, high = interval(np.mean(samples, axis=0))
        found[kind] = {"value": float(np.mean(values)), "low": low, "high": high, "by_seed": values}
    return found


def _table(results: Sequence[Result], scale: DetectorScale) -> list[Section]:
    found = []
    for (model,), here in compare.grouped(results, "model").items():
        prefix = "" if len(scale.models) == 1 else f"{model}, "
        differences = {result["difference"]: result for result in here if "difference" in result}
        for training, cases in ((SHELF, (SHELF, GATE)), (TUNED, (TUNED,))):
            measured = [result for result in here if result.get("training") in cases]
            if not measured:
                continue
            name = f"{prefix}{training}"
            found += [_average_precision(measured, kind, training, name, scale) for kind in BOX_AND_MASK]
            once = dict.fromkeys((result["method"], result["keep_rate"]) for result in measured)
            apart = [
                {**differences[to_dense(training, method, rate)], "method": method, "keep_rate": rate}
                for method, rate in once
                if rate is not None and to_dense(training, method, rate) in differences
            ]
            text = "Box and mask AP, with 95 % intervals over resampled images."
            table = compare.by_rate(apart, lambda r: " / ".join(_with_interval(r[kind]) for kind in BOX_AND_MASK))
            found.append(Section(f"{name}: difference to dense", table, text))
            if training == SHELF:
                dense = next((f"Dense: {r['gflops']:.3f}." for r in measured if r["method"] == DENSE), "")
                table = compare.by_rate(measured, lambda result: result["gflops"], ".3f")
                found.append(Section(f"{prefix}GFLOPs of the backbone", table, dense))
        found += _difference_sections(differences, prefix)
    return found


def _average_precision(results: Sequence[Result], kind: str, training: str, name: str, scale: DetectorScale) -> Section:
    """Return a table of measured and printed AP; what is not reduced stands above it."""
    model = "tiny" if scale.is_miniature else results[0]["model"]
    reduced = [result for result in results if result["method"] not in _UNREDUCED]
    found = compare.by_method(
        reduced,
        "keep_rate",
        f"{kind}_AP",
        expected=lambda row, rate: compare.printed_value("detection", model, training, row, rate, kind),
        comparable=not scale.is_miniature,
    )
    parts = []
    for method in _UNREDUCED:
        value = compare.over_seeds([result for result in results if result["method"] == method], f"{kind}_AP")
        number = printed.value("detection", model, training, method, kind) if found.comparable else None
        as_printed = "" if number is None else f" (printed: {number:.1f})"
        parts += [] if value is None else [f"{method.capitalize()}: {value}{as_printed}."]
    seeds = len({result["seed"] for result in results})
    over = f"Mean over {seeds} seeds of training, in brackets the standard deviation."
    parts.append("One seed: nothing is known about the spread between trainings." if seeds == 1 else over)
    if found.comparable:
        remarks = f"Of the printed numbers: {'; '.join(printed.table('detection')['remarks'])}."
        parts += ["+- is one standard error, of our images and seeds.", remarks, found.remarks()]
    else:
        parts.append("Printed numbers are of ViT-Adapter-T on COCO: they cannot be compared with these.")
    text = f"{' '.join(parts)}\n\n{compare.reasons(results) if kind == BOX_AND_MASK[-1] else ''}"
    return Section(f"{name}: {kind} AP", found.table(), text.strip())


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def _difference_sections(differences: Mapping[str, Result], prefix: str) -> list[Section]:
    text = (
        "Each line is above 0 in the paper's table for both detectors, for boxes and for masks. Differences are of "
        "means over seeds, in points of AP, with 95 % intervals over resampled images; then the box AP of each seed."
    )
    columns = [Column("difference", left=True), Column("box AP"), Column("mask AP"), Column("seeds", left=True)]
    sections = []
    for title, wanted, note in (
        ("what the paper's table says", CLAIMS, text),
        ("not in the paper's table at these keep rates", FURTHER, ""),
    ):
        rows = []
        for name, *_ in wanted:
            if (found := differences.get(name)) and "cannot" not in found:
                by_seed = ", ".join(f"{value:+.1f}" for value in found["box"]["by_seed"])
                rows.append([name, *(_with_interval(found[kind]) for kind in BOX_AND_MASK), by_seed])
        sections += [Section(f"{prefix}{title}", Table(columns, rows), note)] if rows else []
    return sections


def _draw(results: Sequence[Result], scale: DetectorScale, settings: Settings, folder: Path) -> list[Path]:
    """Draw AP by keep rate, one panel per model, training and kind that has several keep rates."""
    panels = []
    measured = [result for result in results if result.get("training") in (SHELF, TUNED)]
    for (model, training), here in compare.grouped(measured, "model", "training").items():
        if len({result["keep_rate"] for result in here} - {None}) > 1:
            for kind in BOX_AND_MASK:
                title = f"{model}, {training}, {kind}"
                panels += compare.panel(here, f"{kind}_AP", title, y_label=f"{kind} AP")
    return compare.draw_panels(panels, folder / "ap.png")


DETECTION = Study(
    name="detection",
    shows="tables objdetseg, objdetsegFull",
    about="Box and mask AP on COCO 2017 of Mask R-CNN on ViT-Adapter T and S with tokens reduced at blocks 3, 6 and 9, "
    "off the shelf and fine-tuned from the dense detector: ATC with three linkages, ToMe, SViT, Evo-ViT, DynamicViT "
    "with and without preserved tokens, EViT and ATS. EViT, ATS and Evo-ViT ask a class token, which the published "
    "detectors do not have: they get a dense detector of their own",
    stands_in="A small detector of garments in scenes made from Fashion-MNIST stands in, trained with a class token, "
    "so that one detector serves all methods; pooling, random dropping, K-Medoids, DPC-KNN and Top-K are added. Off "
    "the shelf by two seeds of training, fine-tuned at 50 % by one.",
    gpu_hours="1,665",
    full=FULL,
    miniature=MINIATURE,
    axes=_axes,
    run=_run,
    table=_table,
    draw=_draw,
    optional=tuple(map(_published, FULL.models)),
)
ITEMS = (DETECTION,)
