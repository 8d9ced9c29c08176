"""What studies of detectors share: the dense detector, what is fine-tuned from it, and the evaluation of one cell.

What a cell found is kept as match tables (which detection is right at which threshold), from which intervals of any
difference between two cells are drawn: the r-th resample has the same images in every cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.config import ReductionConfig
from agglo.lab.evaluation.grid import Reducible, one_of_several
from agglo.lab.paper.classifiers import ALL, FASHION, RATES, SHELF, TUNED, Entry, named, training_choices
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.study import CannotRunError, Settings
from agglo.lab.tasks.detection.data import make_scenes, open_coco, transforms_for
from agglo.lab.tasks.detection.evaluation.average_precision import KINDS
from agglo.lab.tasks.detection.evaluation.matches import Matches, bootstrap, match
from agglo.lab.tasks.detection.evaluation.one_pass import DetectionBatches, evaluate
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.lab.tasks.detection.training.settings import RECIPES, DetectionSettings
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.models.checkpoints import fingerprint, read_checkpoint
from agglo.patch import apply
from agglo.schedule import Counts

COCO = "coco2017"
ASKING = ("evit", "topk", "ats", "evovit")  # what the class token attends to
DENSE_WITH_TOKEN = "dense with class token"
COLLAPSED = Entry("one token", "atc", {"linkage": "average"})  # with a single token, all methods that merge are one
BOX_AND_MASK = tuple(KINDS.values())

Samples = dict[str, NDArray[np.float64]]


def entries(*names: str) -> tuple[Entry, ...]:
    return tuple(entry for name in names for entry in ALL if entry.name == name)


@dataclass(frozen=True)
class DetectorScale:
    """Models, methods, keep rates and trainings of a study of detectors.

    In miniature every detector has a class token, so that one detector serves all methods, and the dense detector is
    trained on as long as the methods are. In full there is a second dense detector for the methods that need a class
    token.

    Attributes:
        methods: Off the shelf come those that learn nothing.
        shelf_rates, tuned_rates: Keep rates, the most telling first.
        dense, tuned: Recipe and choices of training.
        validation: Number of validation scenes in miniature.
    """

    models: tuple[str, ...]
    data: str
    methods: tuple[Entry, ...]
    shelf_rates: tuple[float, ...] = RATES
    tuned_rates: tuple[float, ...] = RATES
    shelf_seeds: int = 1
    tuned_seeds: int = 1
    dense: tuple[str, Mapping[str, Any]] = ("dense", {})
    tuned: tuple[str, Mapping[str, Any]] = ("finetune", {})
    validation: int = 1000
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

    def training(
        self, about: Mapping[str, Any], checkpoint: Path | None, *, entry: Entry | None = None, dense: bool = False
    ) -> DetectionSettings:
        """Return the settings of a cell's training, or of that of the dense detector that it starts from.

        Without an entry the dense detector is trained on like the methods. The miniature's dense one starts from the
        embedded classifier.
        """
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
        """Return AP, tokens left and GFLOPs of a cell; its match tables go into its folder."""
        entry = named((COLLAPSED, *self.scale.methods), about["method"])
        dense = self.dense_weights(about)
        config = reachable_config(opened(dense), entry, about["keep_rate"])
        folder, weights = self.folder(about), dense
        if about["training"] == TUNED:
            weights = self.train(self.scale.training(about, dense, entry=entry), folder / "run")
        detector = opened(weights)
        found = judged(detector, config, self.opened_images(detector.spec.image_size), folder, self.settings)
        found["weights_with_token" if self.scale.asks(about["method"]) else "weights"] = _fingerprint(dense)
        if self.is_main:
            resampled = self.samples(about)
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
            train_detector(chosen, self.settings.data[self.scale.data], run, cpu=self.settings.on_cpu)
            self.trained.add(run)
        return run / "last" / "model.safetensors"

    def folder(self, about: Mapping[str, Any]) -> Path:
        """Return the folder of a cell's match tables and of its training."""
        names = [about["model"], f"seed{about['seed']}", about["training"], about["method"], f"{about['keep_rate']}"]
        return self.settings.run_folder(self.item, *(name.replace(" ", "-") for name in names))

    def samples(self, about: Mapping[str, Any]) -> Samples:
        return samples_in(self.folder(about), self.scale.resamples)


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
    detector: Opened, config: ReductionConfig | None, images: DetectionBatches, folder: Path, settings: Settings
) -> dict[str, Any]:
    """Return AP, tokens left and GFLOPs of a reduced detector; its match tables go into a folder."""

    def keep(results: list[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, name in KINDS.items():
            match(images.data.ground_truth, results, kind).save(folder / f"{name}.npz")

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
    """Return whether match tables are there."""
    return all((folder / f"{name}.npz").is_file() for name in BOX_AND_MASK)


@cache
def samples_in(folder: Path, resamples: int) -> Samples:
    """Return AP in percent of every resample of the images that match tables are of, by "box" and "mask"."""
    found = bootstrap({name: Matches.load(folder / f"{name}.npz") for name in BOX_AND_MASK}, resamples=resamples)
    return {name: 100 * of["AP"] for name, of in found.items()}


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
