"""Not in the paper: detectors on a few real pictures, as a check of the miniature: a dozen COCO images by heart, and
nuclei under a microscope."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agglo.detection.data import transforms_for
from agglo.detection.evaluation.matches import interval
from agglo.detection.evaluation.one_pass import KINDS
from agglo.detection.training.preparation import open_splits
from agglo.detection.training.recipe import RECIPES
from agglo.detection.training.settings import DetectionSettings
from agglo.detection.training.trainer import train_detector
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.reproduce.detectors import (
    COCO,
    COLLAPSED,
    DENSE,
    HeldImages,
    entries,
    is_kept,
    judged,
    opened,
    read_log,
    require_reachable,
    samples_in,
    start,
    variant_of,
)
from agglo.reproduce.estimates import TRAINING as PASSES
from agglo.reproduce.estimates import Size
from agglo.reproduce.item import Cell, Item, Need, Result, RunCell, Section, Settings
from agglo.reproduce.items.beyond import BEYOND

WEIGHTS = start("tiny")
TRAINING, REDUCED = "training", "reduced"
# Of the methods that learn nothing, those that ask no class token: this detector has none, as published.
METHODS = entries("atc average", "atc complete", "atc single", "tome", "pool", "random", "kmedoids")
RATES = (0.25, 0.5)
_RESAMPLES = 500
# A third of the usual width, and fewer proposals: with COCO's heads a step takes four times as long.
HEADS: dict[str, Any] = {
    "anchor_scale": 4,
    "finest_scale": 28,
    "width": 96,
    "box_width": 256,
    "mask_convolutions": 2,
    "box_assignment": {"samples": 256},
    "training_proposals": {"per_level": 1000, "kept": 500},
    "test_proposals": {"per_level": 500, "kept": 300},
}


class RealDetection(Item):
    """Trains DeiT-Tiny's detector by the recipe `small_data` and writes down its AP after epochs.

    data: name of its need. epochs, choices: of the training. reduces: whether it is then judged with fewer tokens.
    """

    shows = BEYOND
    in_miniature = False

    def __init__(
        self,
        name: str,
        about: str,
        data: Need,
        *,
        epochs: int,
        choices: dict[str, Any],
        reduces: bool,
        heads: dict[str, Any] = HEADS,
    ) -> None:
        self.name, self.about, self._data, self._epochs = name, about, data, epochs
        self._choices, self._reduces, self._heads = choices, reduces, heads

    def needs(self, miniature: bool) -> Sequence[Need]:
        return self._data, Need("weights", WEIGHTS, "DeiT-T, published")

    def cells(self, settings: Settings) -> Sequence[Cell]:
        needs = (self._data.name, WEIGHTS)
        places: list[tuple[str, str, float | None]] = [(TRAINING, DENSE, None)]
        if self._reduces:
            places += [(REDUCED, DENSE, None), (REDUCED, COLLAPSED.name, None)]
            places += [(REDUCED, entry.name, rate) for rate in RATES for entry in METHODS]
        return [
            Cell({"part": part, "method": method, "keep_rate": rate}, needs, _cost(part, self._epochs))
            for part, method, rate in places
        ]

    def training(self, checkpoint: Path) -> DetectionSettings:
        drops = {"epochs": self._epochs, "lr_drops": [0.8 * self._epochs], "workers": 0, "head_options": self._heads}
        settings, _ = RECIPES.load("small_data").resolve({"checkpoint": str(checkpoint), **drops, **self._choices})
        return settings

    def open(self, settings: Settings) -> RunCell:
        chosen, data = self.training(settings.weights[WEIGHTS]), settings.data[self._data.name]
        folder = settings.run_folder(self.name)
        splits = cache(lambda: open_splits(chosen, data))
        images = cache(lambda: HeldImages(splits().validation, transforms_for(chosen.image_size)[1]))

        def judge(name: str, rate: float | None) -> tuple[dict[str, Any], Path]:
            train_detector(chosen, data, folder / "run", cpu=settings.on_cpu)
            detector = opened(folder / "run" / "last" / "model.safetensors")
            entry = next((each for each in (COLLAPSED, *METHODS) if each.name == name), None)
            variant = None if entry is None else variant_of(entry, rate)
            if entry is not None:
                require_reachable(detector, entry, variant)
            place = folder / "reduced" / f"{name.replace(' ', '-')}-{rate}"
            return judged(detector, variant, images(), place, settings), place

        def run(cell: Cell) -> dict[str, Any]:
            if cell.about["part"] == TRAINING:
                train_detector(chosen, data, folder / "run", cpu=settings.on_cpu)
                counted = {"train": len(splits().train), "validation": len(splits().validation)}
                log = {"log": read_log(folder / "run" / "log.csv"), "epochs": self._epochs}
                return {**log, "images": counted, "start": settings.weights[WEIGHTS].name}
            found, place = judge(cell.about["method"], cell.about["keep_rate"])
            dense = folder / "reduced" / f"{DENSE}-None"
            if not is_kept(dense):
                judge(DENSE, None)
            ours, others = (samples_in(each, _RESAMPLES) for each in (place, dense))
            return {**found, "to_dense": {kind: interval(ours[kind] - others[kind]) for kind in KINDS.values()}}

        return run

    def sections(self, results: Sequence[Result], settings: Settings) -> Sequence[Section]:
        found = []
        for result in results:
            if result["part"] == TRAINING:
                columns = [Column("epoch", "g"), Column("box AP", ".1f"), Column("mask AP", ".1f")]
                rows = [[row["epoch"], row["box_AP"], row["mask_AP"]] for row in result["log"]]
                images = result["images"]
                text = f"{images['train']} images to learn, {images['validation']} to judge by, from {result['start']}."
                if not rises(result["log"]):
                    text += " AP did not rise: something is wrong."
                found.append(Section("Training", Table(columns, rows), text))
        reduced = [result for result in results if result["part"] == REDUCED]
        if reduced:
            columns = [Column("reduced", left=True), Column("keep rate"), *(Column(f"{k} AP") for k in KINDS.values())]
            rows = [
                [
                    result["method"],
                    "" if result["keep_rate"] is None else f"{result['keep_rate']:.0%}",
                    *(_told(result, kind) for kind in KINDS.values()),
                ]
                for result in reduced
            ]
            text = "In brackets: the 95 % interval of the difference to dense, over resampled images."
            found.append(Section("With fewer tokens, off the shelf", Table(columns, rows), text))
        return found


def _cost(part: str, epochs: int) -> float:
    """About: a few hundred images of 256 x 256."""
    one = Size(192, 12, 256).multiply_adds() + 2e10
    return 300 * one * (PASSES * epochs if part == TRAINING else 1)


def rises(log: Sequence[dict[str, float]]) -> bool:
    """Whether box and mask AP are higher after training than at their first evaluation."""
    return all(log[-1][f"{kind}_AP"] > log[0][f"{kind}_AP"] for kind in KINDS.values())


def _told(result: Result, kind: str) -> str:
    if "cannot" in result:
        return CANNOT
    told = f"{result[f'{kind}_AP']:.1f}"
    low, high = result["to_dense"][kind]
    return told if result["method"] == DENSE else f"{told} [{low:+.1f}, {high:+.1f}]"


ITEMS = (
    RealDetection(
        "coco-overfit",
        "DeiT-T's detector learns a dozen COCO images by heart and is judged by the same ones: AP must rise",
        Need("data", COCO, "COCO 2017, or some of its images with instances*.json"),
        epochs=60,
        choices={
            "images": 12,
            "held_out": 0.0,
            "flip": 0.0,
            "evaluate_first": True,
            "evaluate_every": 5,
            "warmup_steps": 10,
        },
        reduces=False,
    ),
    RealDetection(
        "nuclei",
        "DeiT-T's detector of nuclei in microscope images, trained on four fifths of them and judged by the others, "
        "dense and with fewer tokens, off the shelf",
        Need("data", "nuclei", "images of nuclei with instances.json (2018 Data Science Bowl)"),
        epochs=6,
        choices={"evaluate_every": 1},
        reduces=True,
    ),
)
