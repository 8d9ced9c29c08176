"""What studies of detectors share: the dense detector, what is fine-tuned from it, and the evaluation of one cell.

What a cell found is kept as match tables (which detection is right at which threshold), from which intervals of any
difference between two cells are drawn: the r-th resample has the same images in every cell.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.config import ReductionConfig
from agglo.lab.evaluation.cells import Reducible, one_of_several
from agglo.lab.paper.classifiers import ALL, DENSE, FASHION, RATES, Entry, named, training_choices
from agglo.lab.paper.study import CannotRunError, Settings
from agglo.lab.tasks.detection.data import make_scenes, open_coco, transforms_for
from agglo.lab.tasks.detection.evaluation.matches import Matches, bootstrap, match
from agglo.lab.tasks.detection.evaluation.one_pass import KINDS, Images, evaluate
from agglo.lab.tasks.detection.specs import Opened, open_detector
from agglo.lab.tasks.detection.training.settings import RECIPES, DetectionSettings
from agglo.lab.tasks.detection.training.trainer import train_detector
from agglo.models.checkpoints import fingerprint, read_checkpoint
from agglo.schedule import Counts
from agglo.utils.files import replacing

SHELF, TUNED, GATE = "off the shelf", "fine-tuned", "gate"
COCO = "coco2017"
ASKING = ("evit", "topk", "ats", "evovit")  # what the class token attends to
DENSE_WITH_TOKEN = "dense with class token"
COLLAPSED = Entry("one token", "atc", {"linkage": "average"})  # with a single token, all methods that merge are one
NUMBERS = tuple(f"{kind}_{name}" for kind in KINDS.values() for name in ("AP", "AP50", "AP75"))
_SAMPLES = "samples.npz"

Samples = dict[str, NDArray[np.float64]]


def entries(*names: str) -> tuple[Entry, ...]:
    return tuple(named(ALL, name) for name in names)


PAPER = entries("atc average", "atc complete", "atc single", "tome")
PRUNING = entries("evit", "ats", "evovit", "svit", "dynamicvit", "dynamicvit_prsv")
# Not in the paper's tables of detectors.
FURTHER = entries("pool", "random", "kmedoids", "dpc_knn equal", "dpc_knn", "topk")


@dataclass(frozen=True)
class DetectorScale:
    """What a study of detectors goes by, in full or in miniature.

    Attributes:
        methods: Off the shelf come those that learn nothing.
        shelf_rates, tuned_rates: Keep rates, the most telling first.
        shelf_seeds, tuned_seeds: Seeds of training.
        class_token: Whether every detector has a class token, so that one detector serves all methods. Otherwise there
            is a second dense detector for the methods that ask a class token.
        gate: Whether a detector must lose a third of its AP with a single token before methods are compared by it.
        tuned_dense: Whether the dense detector is trained on as long as the methods are.
        dense, tuned: Recipe and choices.
        validation: Number of validation images; None is all.
        ranked: Keep rates at which methods are ranked.
    """

    models: tuple[str, ...]
    data: str
    methods: tuple[Entry, ...]
    shelf_rates: tuple[float, ...] = RATES
    tuned_rates: tuple[float, ...] = RATES
    shelf_seeds: int = 1
    tuned_seeds: int = 1
    class_token: bool = False
    gate: bool = False
    tuned_dense: bool = False
    dense: tuple[str, Mapping[str, Any]] = ("dense", {})
    tuned: tuple[str, Mapping[str, Any]] = ("finetune", {})
    validation: int | None = None
    ranked: tuple[float, ...] = RATES
    resamples: int = 200
    batch_size: int = 1
    workers: int = 2

    @property
    def is_miniature(self) -> bool:
        return self.data == FASHION

    @property
    def shelf(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.methods if not entry.learns)

    @property
    def fine_tuned(self) -> tuple[Entry, ...]:
        """All methods, without DPC-KNN with equal weights, which stands in off the shelf for the one that learns."""
        return tuple(entry for entry in self.methods if entry.name != "dpc_knn equal")

    def dense_name(self, entry: Entry) -> str:
        """Return the dense detector that an entry is reduced from."""
        return DENSE_WITH_TOKEN if not self.class_token and entry.method in ASKING else DENSE


FULL = DetectorScale(("tiny", "small"), COCO, (*PAPER, *PRUNING))
MINIATURE = DetectorScale(
    ("miniature",),
    FASHION,
    (*PAPER, *FURTHER, *PRUNING),
    shelf_rates=(0.5, 0.25, 0.7, 0.9),
    tuned_rates=(0.5,),
    shelf_seeds=2,
    class_token=True,
    gate=True,
    tuned_dense=True,
    dense=("miniature", {"scenes": 4000, "epochs": 4}),
    # A fifth of the rate that the dense detector starts with, and one drop.
    tuned=("miniature", {"scenes": 800, "epochs": 1, "lr": 1e-4, "warmup_steps": 20}),
    validation=1000,
    ranked=(0.5, 0.25),  # at others the methods lie too close together
    resamples=500,
    batch_size=8,
)


def published(model: str) -> str:
    """Return what weights of a dense detector are called, trained by others or by an earlier run."""
    return f"vit_adapter_{model}"


def start(model: str) -> str:
    """Return what weights are called that a dense detector starts from."""
    return f"deit_{model}_patch16_224"


def dense_settings(
    scale: DetectorScale, model: str, seed: int, *, class_token: bool, checkpoint: Path | None
) -> DetectionSettings:
    """Return the settings of a dense detector's training; the miniature starts from the embedded classifier."""
    name, chosen = scale.dense
    recipe = RECIPES.load(name)
    choices: dict[str, Any] = {"model": model, "seed": seed, "class_token": class_token, **chosen}
    if checkpoint is not None:
        choices["checkpoint"] = str(checkpoint)
    if "epochs" in chosen:
        usual, _ = recipe.resolve({} if checkpoint is None else {"checkpoint": str(checkpoint)})
        choices["lr_drops"] = [drop * chosen["epochs"] / usual.epochs for drop in usual.lr_drops]
    settings, _ = recipe.resolve(choices)
    return settings


def tuned_settings(
    scale: DetectorScale, model: str, seed: int, entry: Entry | None, rate: float | None, checkpoint: Path
) -> DetectionSettings:
    """Return the settings of training with fewer tokens; without an entry the dense detector is trained on alike."""
    name, chosen = scale.tuned
    choices: dict[str, Any] = {"model": model, "seed": seed, "checkpoint": str(checkpoint), **chosen}
    choices["class_token"] = scale.class_token or (entry is not None and entry.method in ASKING)
    choices["method"] = "none" if entry is None else entry.method
    if "epochs" in chosen:
        epochs = chosen["epochs"]
        choices |= {"lr_drops": [2 * epochs / 3], "evaluate_every": epochs}
        choices["validation_scenes"] = min(20, scale.validation or 20)  # the item judges by itself
    if entry is not None:
        choices |= {"keep_rate": rate, **training_choices(entry)}
    settings, _ = RECIPES.load(name).resolve(choices)
    return settings


@dataclass
class Judge:
    """Trains what is missing and evaluates one cell after the other."""

    settings: Settings
    scale: DetectorScale
    item: str
    _weights: dict[Any, Path] = field(default_factory=dict)
    _images: dict[int | None, Images] = field(default_factory=dict)

    def __call__(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return AP, tokens left and GFLOPs of a cell; its match tables go into its folder."""
        model, seed, name, rate = about["model"], about["seed"], about["method"], about["keep_rate"]
        entry = None if name in (DENSE, DENSE_WITH_TOKEN) else named((COLLAPSED, *self.scale.methods), name)
        with_token = name == DENSE_WITH_TOKEN or (entry is not None and entry.method in ASKING)
        dense = self.dense_weights(model, seed, with_token=self.scale.class_token or with_token)
        config = None if entry is None else config_of(entry, rate)
        if entry is not None:
            require_reachable(opened(dense), entry, config)
        weights, folder = dense, self.folder(about)
        if about["training"] == TUNED:
            chosen = tuned_settings(self.scale, model, seed, entry, rate, dense)
            train_detector(chosen, self.settings.data[self.scale.data], folder / "run", cpu=self.settings.on_cpu)
            weights = folder / "run" / "last" / "model.safetensors"
        images = self.images(opened(weights).spec.image_size)
        found = judged(opened(weights), config, images, folder, self.settings)
        # Methods that ask a class token may have a dense detector of their own.
        apart = with_token and not self.scale.class_token
        found["weights_with_token" if apart else "weights"] = _fingerprint(dense)
        if self.is_main:
            resampled = self.samples(about)
            found |= {f"{kind}_error": float(np.nanstd(resampled[kind], ddof=1)) for kind in KINDS.values()}
            log = dense.parents[1] / "log.csv"
            if entry is None and about["training"] == SHELF and dense in self._weights.values() and log.exists():
                found["log"] = read_log(log)
        return found

    @cached_property
    def is_main(self) -> bool:
        accelerator = one_of_several(self.settings.device)
        return accelerator is None or accelerator.is_main_process

    def images(self, side: int | None) -> Images:
        """Return the validation images, the same ones for every seed of training.

        They are resized to squares of this side; None is the paper's way.
        """
        if side not in self._images:
            root, scale = self.settings.data[self.scale.data], self.scale
            transform, size = transforms_for(side)[1], self.settings.batch_size or scale.batch_size
            if scale.is_miniature:
                scenes = make_scenes(root, scale.validation or 1000, 0, "val")
                self._images[side] = HeldImages(scenes, transform, batch_size=size)
            else:
                data = open_coco(root, "val").spread(scale.validation)
                accelerator = one_of_several(self.settings.device)
                how: dict[str, Any] = {"workers": scale.workers, "accelerator": accelerator}
                self._images[side] = Images(data, transform, batch_size=size, **how)
        return self._images[side]

    def dense_weights(self, model: str, seed: int, *, with_token: bool) -> Path:
        """Return the weights that were given, or those of a training that goes on where it was stopped.

        They are the last ones, not the best, so that validation images choose nothing.
        """
        given = self.settings.weights.get(published(model))
        if given is not None and not with_token:
            return given
        key = (model, seed, with_token)
        if key not in self._weights:
            start_from = None if self.scale.is_miniature else self.settings.weights[start(model)]
            chosen = dense_settings(self.scale, model, seed, class_token=with_token, checkpoint=start_from)
            name = DENSE if with_token == self.scale.class_token else "dense-with-class-token"
            run = self.settings.run_folder(self.item, model, f"seed{seed}", name)
            train_detector(chosen, self.settings.data[self.scale.data], run, cpu=self.settings.on_cpu)
            self._weights[key] = run / "last" / "model.safetensors"
        return self._weights[key]

    def folder(self, about: Mapping[str, Any]) -> Path:
        """Return the folder of a cell's match tables and of its training."""
        name, rate = about["method"].replace(" ", "-"), about["keep_rate"]
        place = name if rate is None else f"{name}-{rate:g}"
        seed, training = f"seed{about['seed']}", about["training"].replace(" ", "-")
        return self.settings.run_folder(self.item, about["model"], seed, training, place)

    def samples(self, about: Mapping[str, Any]) -> Samples:
        return samples_in(self.folder(about), self.scale.resamples)


def read_log(path: Path) -> list[dict[str, float]]:
    """Return AP of the validation images after the epochs of a training."""
    with path.open(encoding="utf-8") as file:
        return [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in csv.DictReader(file)]


def config_of(entry: Entry, rate: float | None) -> ReductionConfig:
    """Return an entry's reduction at a keep rate; without one, all tokens collapse to one in the first block."""
    return entry.config(schedule=Counts((1,), blocks=(0,))) if rate is None else entry.config(rate)


def require_reachable(detector: Opened, entry: Entry, config: ReductionConfig | None) -> None:
    """Raise CannotRunError where ToMe cannot leave so few tokens; what any other refuses is a mistake of the study."""
    try:
        Reducible(detector.model, None, "").cells({} if config is None else {config: entry.name}, dense=False)
    except ValueError as error:
        if entry.method != "tome":
            raise
        raise CannotRunError(str(error)) from error


def judged(
    detector: Opened, config: ReductionConfig | None, images: Images, folder: Path, settings: Settings
) -> dict[str, Any]:
    """Return AP, tokens left and GFLOPs of a reduced detector; its match tables go into a folder."""
    reducible = Reducible(detector.model, detector.learned, f"checkpoint {detector.weights}")
    [about] = reducible.cells({} if config is None else {config: config.method}, dense=config is None)
    reducible.apply(config)
    accelerator = one_of_several(settings.device)
    detector.model.to(settings.device if accelerator is None else accelerator.device)
    found = evaluate(detector.model, images, accelerator=accelerator, keep=keeping(images, folder))
    counted = {"tokens": about.about["counts"][-1], "gflops": about.about["gflops"]}
    return {**{name: found[name] for name in NUMBERS}, **counted, "images": found["images"]}


def keeping(images: Images, folder: Path) -> Callable[[list[dict[str, Any]]], None]:
    """Return what writes the match tables of all detections to a folder."""

    def keep(results: list[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SAMPLES).unlink(missing_ok=True)  # of tables from before
        for kind, name in KINDS.items():
            match(images.data.ground_truth, results, kind).save(folder / f"{name}.npz")

    return keep


def is_kept(folder: Path) -> bool:
    """Return whether match tables are there."""
    return all((folder / f"{name}.npz").is_file() for name in KINDS.values())


def samples_in(folder: Path, resamples: int) -> Samples:
    """Return AP in percent of every resample of the images that match tables are of, by "box" and "mask"."""
    kept = folder / _SAMPLES
    if kept.exists():
        with np.load(kept) as arrays:
            found = {name: arrays[name] for name in KINDS.values()}
        if all(len(values) == resamples for values in found.values()):
            return found
    found = {
        name: 100 * bootstrap({name: Matches.load(folder / f"{name}.npz")}, resamples=resamples)[name]["AP"]
        for name in KINDS.values()
    }
    with replacing(kept) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **found)
    return found


@lru_cache(maxsize=8)
def _fingerprint(weights: Path) -> str:
    return fingerprint(read_checkpoint(weights))


@lru_cache(maxsize=1)
def opened(weights: Path) -> Opened:
    return open_detector(str(weights))


class HeldImages(Images):
    """Images that are prepared once: every cell looks at the same ones."""

    def __iter__(self) -> Any:
        if not hasattr(self, "_held"):
            self._held: Sequence[Any] = list(super().__iter__())
        return iter(self._held)
