"""What items about detectors share: the dense detector, what is fine-tuned from it, and the judging of one cell.

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

from agglo.detection.data import make_scenes, open_coco, transforms_for
from agglo.detection.evaluation.matches import Matches, bootstrap, match
from agglo.detection.evaluation.one_pass import KINDS, Images, evaluate
from agglo.detection.specs import Opened, open_detector
from agglo.detection.training.recipe import RECIPES
from agglo.detection.training.settings import DetectionSettings
from agglo.detection.training.trainer import train_detector
from agglo.experiments.checkpoints import fingerprint, read_checkpoint
from agglo.experiments.evaluation.cells import Reducible, one_of_several
from agglo.experiments.files import replacing
from agglo.experiments.variants import Variant
from agglo.reproduce.classifiers import ALL, ATC, DENSE, FASHION, RATES, Entry, named
from agglo.reproduce.item import CannotRunError, Settings
from agglo.schedule import Counts

SHELF, TUNED, GATE = "off the shelf", "fine-tuned", "gate"
COCO = "coco2017"
ASKING = ("evit", "topk", "ats", "evovit")  # what the class token attends to
DENSE_WITH_TOKEN = "dense with class token"
COLLAPSED = Entry("one token", "atc", "average")  # with a single token, all methods that merge are one
NUMBERS = tuple(f"{kind}_{name}" for kind in KINDS.values() for name in ("AP", "AP50", "AP75"))
_SAMPLES = "samples.npz"

Samples = dict[str, NDArray[np.float64]]


def entries(*names: str) -> tuple[Entry, ...]:
    return tuple(named((*ATC, *ALL), name) for name in names)


PAPER = entries("atc average", "atc complete", "atc single", "tome")
PRUNING = entries("evit", "ats", "evovit", "svit", "dynamicvit", "dynamicvit_prsv")
# Not in the paper's tables of detectors.
FURTHER = entries("pool", "random", "kmedoids", "dpc_knn equal", "dpc_knn", "topk")


@dataclass(frozen=True)
class Scale:
    """What differs between a full run and one in miniature.

    methods: off the shelf come those that learn nothing.
    shelf_rates, tuned_rates: keep rates, in the order of what they tell. shelf_seeds, tuned_seeds: of training.
    class_token: whether every detector has one, so that one detector serves all methods. Otherwise there is a second
        dense detector for the methods that ask a class token.
    gate: whether a detector must lose a third of its AP with a single token before methods are told apart by it.
    tuned_dense: whether the dense detector is trained on as long as the methods are.
    dense, tuned: recipe and choices. validation: images that judge; None is all.
    ranked: keep rates at which methods are ranked.
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
    def shelf(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.methods if not entry.learns)

    @property
    def fine_tuned(self) -> tuple[Entry, ...]:
        """DPC-KNN with equal weights is what stands in off the shelf for the one that learns."""
        return tuple(entry for entry in self.methods if entry.name != "dpc_knn equal")

    def dense_name(self, entry: Entry) -> str:
        """The dense detector that an entry is reduced from."""
        return DENSE_WITH_TOKEN if not self.class_token and entry.method in ASKING else DENSE


FULL = Scale(("tiny", "small"), COCO, (*PAPER, *PRUNING))
MINIATURE = Scale(
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
    """What weights of a dense detector are called, trained by others or by an earlier run."""
    return f"vit_adapter_{model}"


def start(model: str) -> str:
    """What weights are called that a dense detector starts from."""
    return f"deit_{model}_patch16_224"


def dense_settings(
    scale: Scale, model: str, seed: int, *, class_token: bool, checkpoint: Path | None
) -> DetectionSettings:
    """Of a dense detector's training; the miniature starts from the embedded classifier."""
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
    scale: Scale, model: str, seed: int, entry: Entry | None, rate: float | None, checkpoint: Path
) -> DetectionSettings:
    """The same with fewer tokens, from a dense detector; without an entry it is the dense one, trained on alike."""
    name, chosen = scale.tuned
    choices: dict[str, Any] = {"model": model, "seed": seed, "checkpoint": str(checkpoint), **chosen}
    choices["class_token"] = scale.class_token or (entry is not None and entry.method in ASKING)
    choices["method"] = "none" if entry is None else entry.method
    if "epochs" in chosen:
        epochs = chosen["epochs"]
        choices |= {"lr_drops": [2 * epochs / 3], "evaluate_every": epochs}
        choices["validation_scenes"] = min(20, scale.validation or 20)  # the item judges by itself
    if entry is not None:
        choices |= {"keep_rate": rate, "method_options": dict(entry.options)}
        choices |= {} if entry.linkage is None else {"linkage": entry.linkage}
    settings, _ = RECIPES.load(name).resolve(choices)
    return settings


@dataclass
class Judge:
    """Trains what is missing and judges one cell after the other."""

    settings: Settings
    scale: Scale
    item: str
    _weights: dict[Any, Path] = field(default_factory=dict)
    _images: dict[int | None, Images] = field(default_factory=dict)

    def __call__(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """AP, tokens left and GFLOPs of a cell; its match tables go into its folder."""
        model, seed, name, rate = about["model"], about["seed"], about["method"], about["keep_rate"]
        entry = None if name in (DENSE, DENSE_WITH_TOKEN) else named((COLLAPSED, *self.scale.methods), name)
        with_token = name == DENSE_WITH_TOKEN or (entry is not None and entry.method in ASKING)
        dense = self.dense_weights(model, seed, with_token=self.scale.class_token or with_token)
        variant = None if entry is None else variant_of(entry, rate)
        if entry is not None:
            require_reachable(opened(dense), entry, variant)
        weights, folder = dense, self.folder(about)
        if about["training"] == TUNED:
            chosen = tuned_settings(self.scale, model, seed, entry, rate, dense)
            train_detector(chosen, self.settings.data[self.scale.data], folder / "run", cpu=self.settings.on_cpu)
            weights = folder / "run" / "last" / "model.safetensors"
        images = self.images(opened(weights).spec.image_size)
        found = judged(opened(weights), variant, images, folder, self.settings)
        # Methods that ask a class token may have a dense detector of their own.
        apart = with_token and not self.scale.class_token
        found["weights_with_token" if apart else "weights"] = _fingerprint(dense)
        if self.is_main:
            resampled = self.samples(about)
            found |= {f"{kind}_error": float(np.nanstd(resampled[kind], ddof=1)) for kind in KINDS.values()}
            if entry is None and about["training"] == SHELF and (log := self._log(dense)):
                found["log"] = log
        return found

    @cached_property
    def is_main(self) -> bool:
        accelerator = one_of_several(self.settings.device)
        return accelerator is None or accelerator.is_main_process

    def images(self, side: int | None) -> Images:
        """That all cells are judged by, the same ones for every seed of training.

        side: of the squares that images are made; None is the paper's way.
        """
        if side not in self._images:
            root, scale = self.settings.data[self.scale.data], self.scale
            transform, size = transforms_for(side)[1], self.settings.batch_size or scale.batch_size
            if scale.data == FASHION:
                scenes = make_scenes(root, scale.validation or 1000, 0, "val")
                self._images[side] = HeldImages(scenes, transform, batch_size=size)
            else:
                data = open_coco(root, "val").spread(scale.validation)
                accelerator = one_of_several(self.settings.device)
                how: dict[str, Any] = {"workers": scale.workers, "accelerator": accelerator}
                self._images[side] = Images(data, transform, batch_size=size, **how)
        return self._images[side]

    def dense_weights(self, model: str, seed: int, *, with_token: bool) -> Path:
        """Given, or of a training that goes on where it was stopped: the last weights, not the best, so that validation
        images choose nothing."""
        given = self.settings.weights.get(published(model))
        if given is not None and not with_token:
            return given
        key = (model, seed, with_token)
        if key not in self._weights:
            start_from = None if self.settings.miniature else self.settings.weights[start(model)]
            chosen = dense_settings(self.scale, model, seed, class_token=with_token, checkpoint=start_from)
            name = DENSE if with_token == self.scale.class_token else "dense-with-class-token"
            run = self.settings.run_folder(self.item, model, f"seed{seed}", name)
            train_detector(chosen, self.settings.data[self.scale.data], run, cpu=self.settings.on_cpu)
            self._weights[key] = run / "last" / "model.safetensors"
        return self._weights[key]

    def _log(self, dense: Path) -> list[dict[str, float]]:
        """AP of the dense detector's own validation images after its epochs; none of weights that were given."""
        log = dense.parents[1] / "log.csv"
        if dense in self.settings.weights.values() or not log.exists():
            return []
        return read_log(log)

    def folder(self, about: Mapping[str, Any]) -> Path:
        """Of a cell's match tables and of its training."""
        name, rate = about["method"].replace(" ", "-"), about["keep_rate"]
        place = name if rate is None else f"{name}-{rate:g}"
        seed, training = f"seed{about['seed']}", about["training"].replace(" ", "-")
        return self.settings.run_folder(self.item, about["model"], seed, training, place)

    def samples(self, about: Mapping[str, Any]) -> Samples:
        return samples_in(self.folder(about), self.scale.resamples)


def read_log(path: Path) -> list[dict[str, float]]:
    """AP of the validation images after the epochs of a training."""
    with path.open(encoding="utf-8") as file:
        return [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in csv.DictReader(file)]


def variant_of(entry: Entry, rate: float | None) -> Variant:
    """Without a rate: all tokens collapsed to one, in the first block."""
    return entry.variant(schedule=Counts((1,), blocks=(0,))) if rate is None else entry.variant(rate)


def require_reachable(detector: Opened, entry: Entry, variant: Variant | None) -> None:
    """CannotRunError where ToMe cannot leave so few tokens; what any other refuses is a mistake of the item."""
    try:
        Reducible(detector.model, None, "").cells([] if variant is None else [variant], dense=False)
    except ValueError as error:
        if entry.method != "tome":
            raise
        raise CannotRunError(str(error)) from error


def judged(
    detector: Opened, variant: Variant | None, images: Images, folder: Path, settings: Settings
) -> dict[str, Any]:
    """AP, tokens left and GFLOPs of a detector reduced in one way. folder: for the match tables."""
    reducible = Reducible(detector.model, detector.learned, f"checkpoint {detector.weights}")
    [about] = reducible.cells([] if variant is None else [variant], dense=variant is None)
    reducible.apply(variant)
    accelerator = one_of_several(settings.device)
    detector.model.to(settings.device if accelerator is None else accelerator.device)
    found = evaluate(detector.model, images, accelerator=accelerator, keep=keeping(images, folder))
    counted = {"tokens": about.about["counts"][-1], "gflops": about.about["gflops"]}
    return {**{name: found[name] for name in NUMBERS}, **counted, "images": found["images"]}


def keeping(images: Images, folder: Path) -> Callable[[list[dict[str, Any]]], None]:
    """What writes the match tables of all detections to a folder."""

    def keep(results: list[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SAMPLES).unlink(missing_ok=True)  # of tables from before
        for kind, name in KINDS.items():
            match(images.data.ground_truth, results, kind).save(folder / f"{name}.npz")

    return keep


def is_kept(folder: Path) -> bool:
    """Whether match tables are there."""
    return all((folder / f"{name}.npz").is_file() for name in KINDS.values())


def samples_in(folder: Path, resamples: int) -> Samples:
    """By "box" and "mask": AP in percent of every resample of the images that match tables are of."""
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
    """Prepared once: every cell looks at the same images."""

    def __iter__(self) -> Any:
        if not hasattr(self, "_held"):
            self._held: Sequence[Any] = list(super().__iter__())
        return iter(self._held)
