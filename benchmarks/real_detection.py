"""Detectors on real pictures, as a check of the miniature: a dozen COCO images by heart, and nuclei under a microscope.

    make coco-overfit DATA=coco-mini-train CHECKPOINT=deit_tiny_patch16_224.safetensors
    make nuclei-detection DATA=nuclei CHECKPOINT=deit_tiny_patch16_224.safetensors

overfit: DeiT-Tiny's detector trains on twelve images and is judged by the same ones: AP must rise.
nuclei: it trains on four fifths of the images and is judged by the others, dense and with fewer tokens, off the shelf.

AP after every epoch, machine and date go to results/real-detection/, and tables into docs/mini-detection.md. A run that
was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agglo.detection.data import transforms_for
from agglo.detection.evaluation.matches import interval
from agglo.detection.evaluation.one_pass import KINDS, Images
from agglo.detection.specs import open_detector
from agglo.detection.training.preparation import open_splits
from agglo.detection.training.recipe import RECIPES
from agglo.detection.training.settings import DetectionSettings
from agglo.detection.training.trainer import train_detector
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import CANNOT, Column, Table
from agglo.experiments.variants import Variant
from agglo.methods import create
from agglo.schedule import Counts
from benchmarks.marks import replace_between_marks
from benchmarks.mini_detection_cells import judged, samples_in
from benchmarks.mini_detection_plan import COLLAPSED, ENTRIES, RANKED

RESULTS = Path(__file__).parent / "results" / "real-detection"
PAGE = Path(__file__).parents[1] / "docs" / "mini-detection.md"
PARTS = {"overfit": "A dozen COCO images by heart", "nuclei": "Nuclei"}
EPOCHS = {"overfit": 60, "nuclei": 6}
# Of the methods that learn nothing, those that ask no class token: this detector has none, as published.
_NAMES = ("atc average", "atc complete", "atc single", "tome", "pool", "random", "kmedoids")
_RESAMPLES = 500
_COMMANDS = {"overfit": "make coco-overfit", "nuclei": "make nuclei-detection"}
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


def settings_of(part: str, checkpoint: Path | None, epochs: int) -> DetectionSettings:
    """The recipe `small_data`, for the twelve images without augmentation and without held-out images."""
    start: dict[str, Any] = {"from_scratch": True} if checkpoint is None else {"checkpoint": str(checkpoint)}
    choices = {**start, "epochs": epochs, "lr_drops": [0.8 * epochs], "workers": 0, "head_options": _HEADS}
    if part == "overfit":
        choices |= {"images": 12, "held_out": 0.0, "flip": 0.0, "evaluate_first": True, "evaluate_every": 5}
        choices |= {"warmup_steps": 10}
    else:
        choices["evaluate_every"] = 1
    settings, _ = RECIPES.load("small_data").resolve(choices)
    return settings


def reductions() -> list[Variant | None]:
    """Dense, a single token, and the methods at the keep rates that are ranked in the miniature."""
    entries = [entry for entry in ENTRIES if entry.name in _NAMES]
    merged = create(COLLAPSED.method, **COLLAPSED.all_options)
    return [
        None,
        Variant(COLLAPSED.name, merged, schedule=Counts((1,), blocks=(0,))),
        *(Variant(e.name, create(e.method, **e.all_options), keep_rate=r) for r in RANKED for e in entries),
    ]


def reduced(settings: DetectionSettings, data: Path, run: Path) -> list[dict[str, Any]]:
    """AP on the held-out images, and differences to dense with intervals over these images."""
    opened = open_detector(str(run / "last" / "model.safetensors"))
    images = Images(open_splits(settings, data).validation, transforms_for(settings.image_size)[1])
    variants, rows = reductions(), []
    with progress(len(variants), "reduced") as advance:
        for variant in variants:
            name = "dense" if variant is None else variant.name
            rate = None if variant is None else variant.keep_rate
            folder = run / "reduced" / f"{name.replace(' ', '-')}-{rate}"
            row: dict[str, Any] = {"name": name, "keep_rate": rate}
            if name == "tome" and rate is not None and rate < 0.5:
                row["cannot"] = "ToMe removes at most half of the tokens"
            else:
                row |= judged(opened, variant, images, folder)
                ours, dense = (samples_in(each, _RESAMPLES) for each in (folder, run / "reduced" / "dense-None"))
                row["to_dense"] = {kind: interval(ours[kind] - dense[kind]) for kind in KINDS.values()}
            rows.append(row)
            advance(name)
    return rows


def run(part: str, data: Path, checkpoint: Path | None, epochs: int, folder: Path) -> dict[str, Any]:
    """Train, or go on, and judge; the record."""
    settings = settings_of(part, checkpoint, epochs)
    train_detector(settings, data, folder)
    splits = open_splits(settings, data)
    with (folder / "log.csv").open(encoding="utf-8") as file:
        log = [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in csv.DictReader(file)]
    return {
        "part": part,
        "machine": machine(),
        "epochs": epochs,
        "start": "random weights" if checkpoint is None else checkpoint.name,
        "images": {"train": len(splits.train), "validation": len(splits.validation)},
        "log": log,
        "reduced": reduced(settings, data, folder) if part == "nuclei" else [],
    }


def rises(record: Mapping[str, Any]) -> bool:
    """Whether box and mask AP are higher after training than at their first evaluation."""
    first, last = record["log"][0], record["log"][-1]
    return all(last[f"{kind}_AP"] > first[f"{kind}_AP"] for kind in KINDS.values())


def text(record: Mapping[str, Any]) -> str:
    """AP by epoch, and of the reduced detector if it was judged."""
    found, images = record["machine"], record["images"]
    columns = [Column("epoch", "g"), Column("box AP", ".1f"), Column("mask AP", ".1f")]
    log = Table(columns, [[row["epoch"], row["box_AP"], row["mask_AP"]] for row in record["log"]]).markdown()
    head = (
        f"{PARTS[record['part']]}: {images['train']} images to learn, {images['validation']} to judge by, from "
        f"{record['start']} ({found['cpu']}, {found['date'][:10]})"
    )
    if not record["reduced"]:
        return f"{head}\n\n{log}"
    columns = [Column("reduced", left=True), Column("keep rate"), *(Column(f"{kind} AP") for kind in KINDS.values())]
    rows = []
    for row in record["reduced"]:
        rate = "" if row["keep_rate"] is None else f"{row['keep_rate']:.0%}"
        rows.append([row["name"], rate, *(_told(row, kind) for kind in KINDS.values())])
    note = "In brackets: the 95 % interval of the difference to dense, over resampled images."
    return f"{head}\n\n{log}\n\n{Table(columns, rows).markdown()}\n\n{note}"


def _told(row: Mapping[str, Any], kind: str) -> str:
    if "cannot" in row:
        return CANNOT
    low, high = row["to_dense"][kind]
    told = f"{row[f'{kind}_AP']:.1f}"
    return told if row["name"] == "dense" else f"{told} [{low:+.1f}, {high:+.1f}]"


def record_path(part: str) -> Path:
    return RESULTS / f"{part}.json"


def has_place(page: str, part: str) -> bool:
    return f"<!-- {part}:" in page


def with_table(page: str, record: Mapping[str, Any]) -> str:
    """A page with the tables of a record; at its end if it has no place for them yet."""
    part = record["part"]
    place = f"\n<!-- {part}: {_COMMANDS[part]} -->\n<!-- end of {part} -->\n"
    return replace_between_marks(page if has_place(page, part) else page + place, part, text(record))


def load(part: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record_path(part).read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--data", type=Path, required=True, help="images with instances*.json, as `agglo detect` takes it"
    )
    parser.add_argument("--checkpoint", type=Path, help="DeiT-Tiny's weights (default: start at random)")
    parser.add_argument("--epochs", type=int, help=f"(default: {EPOCHS})")
    parser.add_argument("--runs", type=Path, default=Path("runs/real-detection"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    part, epochs = arguments.part, arguments.epochs or EPOCHS[arguments.part]
    record = run(part, arguments.data, arguments.checkpoint, epochs, arguments.runs / part)
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(record_path(part), record)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(text(record))
    if not rises(record):
        raise SystemExit("AP did not rise: something is wrong")


if __name__ == "__main__":
    main()
