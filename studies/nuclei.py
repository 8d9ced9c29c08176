"""A detector of nuclei in microscope images, dense and with fewer tokens: the miniature checked on real images."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agglo.lab.paper.classifiers import named
from agglo.lab.paper.compare import DENSE
from agglo.lab.paper.items.detection import (
    BOX_AND_MASK,
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
from agglo.lab.tasks.detection.evaluation.bootstrap import interval
from agglo.lab.tasks.detection.training.settings import RECIPES
from agglo.lab.tasks.detection.training.trainer import open_splits, train_detector
from agglo.utils.tables import CANNOT, Column, Table
from studies import study

DATA = Need("data", "nuclei", "images of nuclei with instances.json (2018 Data Science Bowl)")
WEIGHTS = Need("weights", start("tiny"), "DeiT-T, published")
TRAINING, REDUCED = "training", "reduced"
# Of the methods that learn nothing, those that need no class token: this detector has none, as published.
METHODS = entries("atc average", "atc complete", "atc single", "tome", "pool", "random", "kmedoids")
_RESAMPLES = 500
# A third of the usual width, and fewer proposals: with COCO's heads a step takes four times as long.
_HEADS: dict[str, Any] = {
    "anchor_scale": 4,
    "finest_scale": 28,
    "width": 96,
    "box_width": 256,
    "mask_convolutions": 2,
    "box_assignment": {"samples": 256},
    "training_proposals": {"per_level": 1000, "kept": 500},
    "test_proposals": {"per_level": 500, "kept": 300},
}
CHOICES: dict[str, Any] = {"epochs": 6, "lr_drops": [4.8], "evaluate_every": 1, "workers": 0, "head_options": _HEADS}


def _axes(choices: Mapping[str, Any], settings: Settings) -> Iterator[StudyCell]:
    cases: list[tuple[str, str, float | None]] = [(TRAINING, DENSE, None), (REDUCED, DENSE, None)]
    cases += [(REDUCED, COLLAPSED.name, None), *((REDUCED, m.name, rate) for rate in (0.25, 0.5) for m in METHODS)]
    for part, method, rate in cases:
        yield StudyCell({"part": part, "method": method, "keep_rate": rate}, (DATA, WEIGHTS))


def _run(choices: Mapping[str, Any], settings: Settings) -> RunCell:
    checkpoint, data = settings.weights[WEIGHTS.name], settings.data[DATA.name]
    chosen, _ = RECIPES.load("small_data").resolve({"checkpoint": str(checkpoint), **choices})
    folder = settings.run_folder("nuclei")
    splits = cache(lambda: open_splits(chosen, data))
    images = cache(lambda: HeldImages(splits()[1], transforms_for(chosen.image_size)[1]))

    def judge(name: str, rate: float | None) -> tuple[dict[str, Any], Path]:
        detector = opened(folder / "run" / "last" / "model.safetensors")
        config = reachable_config(detector, named((COLLAPSED, *METHODS), name), rate)
        samples = folder / "reduced" / f"{name.replace(' ', '-')}-{rate}"
        return judged(detector, config, images(), samples, settings, _RESAMPLES), samples

    def run(about: Mapping[str, Any]) -> dict[str, Any]:
        train_detector(chosen, data, folder / "run", cpu=settings.device == "cpu")
        if about["part"] == TRAINING:
            counted = dict(zip(("train", "validation"), map(len, splits()), strict=True))
            with (folder / "run" / "log.csv").open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            log = [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in rows]
            return {"log": log, "epochs": chosen.epochs, "images": counted, "start": checkpoint.name}
        found, samples = judge(about["method"], about["keep_rate"])
        dense = folder / "reduced" / f"{DENSE}-None"
        if not is_kept(dense):
            judge(DENSE, None)
        ours, others = (samples_in(each) for each in (samples, dense))
        return {**found, "to_dense": {kind: interval(ours[kind] - others[kind]) for kind in BOX_AND_MASK}}

    return run


def _table(results: Sequence[Result], choices: Mapping[str, Any]) -> list[Section]:
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
            rows.append([result["method"], rate, *(_average_precision(result, kind) for kind in BOX_AND_MASK)])
        text = "In brackets: the 95 % interval of the difference to dense, over resampled images."
        found.append(Section("With fewer tokens, off the shelf", Table(columns, rows), text))
    return found


def _average_precision(result: Result, kind: str) -> str:
    if "cannot" in result:
        return CANNOT
    text, (low, high) = f"{result[f'{kind}_AP']:.1f}", result["to_dense"][kind]
    return text if result["method"] == DENSE else f"{text} [{low:+.1f}, {high:+.1f}]"


ITEMS = (
    study(
        name="nuclei",
        about="DeiT-T's detector of nuclei in microscope images, trained on four fifths of them and judged by the "
        "others, dense and with fewer tokens, off the shelf",
        full=CHOICES,
        miniature=None,
        axes=_axes,
        run=_run,
        table=_table,
    ),
)
