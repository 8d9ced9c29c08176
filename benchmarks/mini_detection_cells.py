"""The cells of the detection in miniature: a detector trained, reduced in one way, and judged on validation scenes.

What a cell found is kept as match tables (which detection is right at which threshold), from which intervals of any
difference between two cells are drawn: the r-th resample has the same scenes in every cell.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agglo.detection.data import make_scenes, transforms_for
from agglo.detection.evaluation.matches import Matches, bootstrap, match
from agglo.detection.evaluation.one_pass import KINDS, Images, evaluate
from agglo.detection.specs import Opened, open_detector
from agglo.detection.training.recipe import RECIPES
from agglo.detection.training.settings import DetectionSettings
from agglo.detection.training.trainer import train_detector
from agglo.experiments.evaluation.cells import Reducible
from agglo.experiments.files import replacing
from agglo.experiments.variants import Variant
from benchmarks.mini_detection_plan import TUNED, Cell, Study

NUMBERS = tuple(f"{kind}_{name}" for kind in KINDS.values() for name in ("AP", "AP50", "AP75"))
# A fifth of the rate that the dense detector starts with, and one drop.
TUNING: dict[str, Any] = {"lr": 1e-4, "warmup_steps": 20}
_SAMPLES = "samples.npz"

Samples = dict[str, NDArray[np.float64]]


def dense_settings(study: Study, seed: int) -> DetectionSettings:
    """The recipe `miniature`, with a class token: injectors and extractors leave it alone, methods that ask it find it,
    and so all methods reduce the very same detector."""
    usual, _ = RECIPES.load("miniature").resolve({})
    drops = [drop * study.epochs / usual.epochs for drop in usual.lr_drops]
    settings, _ = RECIPES.load("miniature").resolve(
        {"class_token": True, "seed": seed, "scenes": study.scenes, "epochs": study.epochs, "lr_drops": drops}
    )
    return settings


def tuned_settings(study: Study, cell: Cell) -> DetectionSettings:
    """The same with fewer tokens, from the dense detector of the same seed, on the first of its scenes.

    The cell without a rate is the dense detector, trained on alike.
    """
    epochs = study.tuning_epochs
    choices: dict[str, Any] = {
        **TUNING,
        "class_token": True,
        "seed": cell.seed,
        "checkpoint": str(study.dense_weights(cell.seed)),
        "scenes": study.tuning_scenes,
        "epochs": epochs,
        "lr_drops": [2 * epochs / 3],
        "validation_scenes": 20,  # the study judges by itself
        "evaluate_every": epochs,
        "method": cell.entry.method,
    }
    if cell.rate is not None:
        choices |= {"keep_rate": cell.rate, "method_options": dict(cell.entry.options)}
    if cell.entry.linkage is not None:
        choices["linkage"] = cell.entry.linkage
    settings, _ = RECIPES.load("miniature").resolve(choices)
    return settings


def measure(study: Study, cell: Cell) -> dict[str, Any]:
    """One cell: trained first, or what is left of it, if it is a fine-tuned one."""
    weights = study.dense_weights(cell.seed)
    if cell.part == TUNED and refusal(weights, cell) is None:
        run = cell.folder(study) / "run"
        train_detector(tuned_settings(study, cell), study.data, run)
        weights = run / "last" / "model.safetensors"
    found = judge(study, weights, cell)
    return {**cell.key, **found}


def refusal(weights: Path, cell: Cell) -> str | None:
    """Why a method cannot leave so few tokens. That is ToMe; what any other refuses is a mistake of this study."""
    variant = cell.variant()
    opened = _opened(weights)
    try:
        Reducible(opened.model, None, "").cells([] if variant is None else [variant], dense=False)
    except ValueError as error:
        if cell.entry.method != "tome":
            raise
        return str(error)
    return None


def judge(study: Study, weights: Path, cell: Cell) -> dict[str, Any]:
    """AP, tokens left and GFLOPs of a cell with the weights of a file; its match tables go into its folder."""
    if (reason := refusal(weights, cell)) is not None:
        return {"cannot": reason}
    found = judged(_opened(weights), cell.variant(), scenes(study), cell.folder(study))
    samples(study, cell)
    return found


def judged(opened: Opened, variant: Variant | None, images: Images, folder: Path) -> dict[str, Any]:
    """The same for any detector on any images. folder: for the match tables."""
    reducible = Reducible(opened.model, opened.learned, f"checkpoint {opened.weights}")
    [about] = reducible.cells([] if variant is None else [variant], dense=variant is None)
    reducible.apply(variant)

    def keep(results: list[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SAMPLES).unlink(missing_ok=True)  # of tables from before
        for kind, name in KINDS.items():
            match(images.data.ground_truth, results, kind).save(folder / f"{name}.npz")

    found = evaluate(opened.model, images, keep=keep)
    counted = {"tokens": about.about["counts"][-1], "gflops": about.about["gflops"]}
    return {**counted, **{name: found[name] for name in NUMBERS}}


def is_kept(study: Study, cell: Cell) -> bool:
    """Whether the match tables of a cell are there."""
    return all((cell.folder(study) / f"{name}.npz").is_file() for name in KINDS.values())


def samples(study: Study, cell: Cell) -> Samples:
    """By "box" and "mask": AP in percent of every resample of the validation scenes."""
    return samples_in(cell.folder(study), study.resamples)


def samples_in(folder: Path, resamples: int) -> Samples:
    """The same from the folder of match tables."""
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


@lru_cache(maxsize=1)
def _opened(weights: Path) -> Opened:
    return open_detector(str(weights))


class _Held(Images):
    """Prepared once: every cell looks at the same scenes."""

    def __iter__(self) -> Any:
        if not hasattr(self, "_held"):
            self._held = list(super().__iter__())
        return iter(self._held)


@lru_cache(maxsize=1)
def scenes(study: Study) -> Images:
    """The validation scenes, the same ones for every seed of training."""
    data = make_scenes(study.data, study.validation, 0, "val")
    return _Held(data, transforms_for(dense_settings(study, 0).image_size)[1], batch_size=8)  # one size: no padding
