"""Not in the paper: detectors on a few real images, as a check of the miniature.

A dozen COCO images by heart, and nuclei under a microscope.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agglo.lab.paper.classifiers import named
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.detectors import (
    BOX_AND_MASK,
    COCO,
    COLLAPSED,
    HeldImages,
    entries,
    is_kept,
    judged,
    opened,
    reachable_config,
    samples_in,
    start,
)
from agglo.lab.paper.study import Need, Result, RunCell, Section, Settings, StudyCell
from agglo.lab.tasks.detection.data import transforms_for
from agglo.lab.tasks.detection.evaluation.matches import interval
from agglo.lab.tasks.detection.training.settings import RECIPES, DetectionSettings
from agglo.lab.tasks.detection.training.trainer import open_splits, train_detector
from agglo.utils.tables import CANNOT, Column, Table
from studies import study

WEIGHTS = Need("weights", start("tiny"), "DeiT-T, published")
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


@dataclass(frozen=True)
class RealImages:
    """Training of DeiT-Tiny's detector by the recipe `small_data`.

    Attributes:
        choices: Of the training.
        reduces: Whether it is then evaluated with fewer tokens.
    """

    name: str
    data: Need
    epochs: int
    choices: Mapping[str, Any]
    reduces: bool = False
    heads: Mapping[str, Any] = field(default_factory=lambda: HEADS)

    def training(self, checkpoint: Path) -> DetectionSettings:
        drops = {"epochs": self.epochs, "lr_drops": [0.8 * self.epochs], "workers": 0, "head_options": self.heads}
        settings, _ = RECIPES.load("small_data").resolve({"checkpoint": str(checkpoint), **drops, **self.choices})
        return settings


def _axes(scale: RealImages, settings: Settings) -> Iterator[StudyCell]:
    places: list[tuple[str, str, float | None]] = [(TRAINING, DENSE, None)]
    if scale.reduces:
        places += [(REDUCED, DENSE, None), (REDUCED, COLLAPSED.name, None)]
        places += [(REDUCED, entry.name, rate) for rate in RATES for entry in METHODS]
    for part, method, rate in places:
        yield StudyCell({"part": part, "method": method, "keep_rate": rate}, (scale.data, WEIGHTS))


def _run(scale: RealImages, settings: Settings) -> RunCell:
    checkpoint, data = settings.weights[WEIGHTS.name], settings.data[scale.data.name]
    chosen, folder = scale.training(checkpoint), settings.run_folder(scale.name)
    splits = cache(lambda: open_splits(chosen, data))
    images = cache(lambda: HeldImages(splits()[1], transforms_for(chosen.image_size)[1]))

    def judge(name: str, rate: float | None) -> tuple[dict[str, Any], Path]:
        detector = opened(folder / "run" / "last" / "model.safetensors")
        config = reachable_config(detector, named((COLLAPSED, *METHODS), name), rate)
        place = folder / "reduced" / f"{name.replace(' ', '-')}-{rate}"
        return judged(detector, config, images(), place, settings), place

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        train_detector(chosen, data, folder / "run", cpu=settings.on_cpu)
        if about["part"] == TRAINING:
            counted = dict(zip(("train", "validation"), map(len, splits()), strict=True))
            with (folder / "run" / "log.csv").open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            log = [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in rows]
            return {"log": log, "epochs": scale.epochs, "images": counted, "start": checkpoint.name}
        found, place = judge(about["method"], about["keep_rate"])
        dense = folder / "reduced" / f"{DENSE}-None"
        if not is_kept(dense):
            judge(DENSE, None)
        ours, others = (samples_in(each, _RESAMPLES) for each in (place, dense))
        return {**found, "to_dense": {kind: interval(ours[kind] - others[kind]) for kind in BOX_AND_MASK}}

    return run


def _table(results: Sequence[Result], scale: RealImages) -> list[Section]:
    found = []
    for result in results:
        if result["part"] == TRAINING:
            columns = [Column("epoch", "g"), Column("box AP", ".1f"), Column("mask AP", ".1f")]
            rows: list[list[Any]] = [[row["epoch"], row["box_AP"], row["mask_AP"]] for row in result["log"]]
            images = result["images"]
            text = f"{images['train']} images to learn, {images['validation']} to judge by, from {result['start']}."
            found.append(Section("Training", Table(columns, rows), text))
    if reduced := [result for result in results if result["part"] == REDUCED]:
        columns = [Column("reduced", left=True), Column("keep rate"), *(Column(f"{k} AP") for k in BOX_AND_MASK)]
        rows = []
        for result in reduced:
            rate = "" if result["keep_rate"] is None else f"{result['keep_rate']:.0%}"
            rows.append([result["method"], rate, *(_cell_text(result, kind) for kind in BOX_AND_MASK)])
        text = "In brackets: the 95 % interval of the difference to dense, over resampled images."
        found.append(Section("With fewer tokens, off the shelf", Table(columns, rows), text))
    return found


def _cell_text(result: Result, kind: str) -> str:
    if "cannot" in result:
        return CANNOT
    text, (low, high) = f"{result[f'{kind}_AP']:.1f}", result["to_dense"][kind]
    return text if result["method"] == DENSE else f"{text} [{low:+.1f}, {high:+.1f}]"


_BY_HEART = {"images": 12, "held_out": 0.0, "flip": 0.0}
_BY_HEART |= {"evaluate_first": True, "evaluate_every": 5, "warmup_steps": 10}
COCO_OVERFIT = RealImages(
    "coco-overfit", Need("data", COCO, "COCO 2017, or some of its images with instances*.json"), 60, _BY_HEART
)
NUCLEI = RealImages(
    "nuclei",
    Need("data", "nuclei", "images of nuclei with instances.json (2018 Data Science Bowl)"),
    6,
    {"evaluate_every": 1},
    reduces=True,
)
_FUNCTIONS: dict[str, Any] = {"miniature": None, "axes": _axes, "run": _run, "table": _table}
ITEMS = (
    study(
        name=COCO_OVERFIT.name,
        about="DeiT-T's detector learns a dozen COCO images by heart and is judged by the same ones: AP must rise",
        full=COCO_OVERFIT,
        **_FUNCTIONS,
    ),
    study(
        name=NUCLEI.name,
        about="DeiT-T's detector of nuclei in microscope images, trained on four fifths of them and judged by the "
        "others, dense and with fewer tokens, off the shelf",
        full=NUCLEI,
        **_FUNCTIONS,
    ),
)
