"""What padding does to AP: a scene alone, and the same scene beside a wider one.

    make padding-effect DATA=fashion-mnist

The embedded detector sees every scene alone, and in a batch with a picture of twice its width, which pads the scene to
that width: half of its patches then show nothing. Tokens are merged with padding apart (agglo's default), and like
everything else (as in the released detectors). Differences come with 95 % intervals over the scenes.

The record goes to results/padding-effect.json, the table into docs/detection.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import agglo
from agglo.detection.data import make_scenes, transforms_for
from agglo.detection.evaluation.matches import interval, match
from agglo.detection.evaluation.one_pass import KINDS, Images, evaluate
from agglo.detection.specs import open_detector
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table
from benchmarks.marks import write_between_marks
from benchmarks.mini_detection_cells import samples_in

RECORD = Path(__file__).parent / "results" / "padding-effect.json"
PAGE = Path(__file__).parents[1] / "docs" / "detection.md"
NAME = "padding"
CASES = (("dense", None), ("atc", 0.5), ("atc", 0.25), ("tome", 0.5))
ALONE, APART, MERGED = "alone", "padded, apart", "padded, merged"


class Beside(nn.Module):
    """A detector that sees a picture of twice the width beside every image, whose detections are left out."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[Tensor], original_sizes: list[tuple[int, int]]) -> list[Any]:
        [image] = images
        wide = torch.cat([image, image.flip(-1)], dim=-1)
        found: list[Any] = self.detector([image, wide], original_sizes=[*original_sizes, wide.shape[-2:]])
        return found[:1]


def measure(data: Path, n_scenes: int, resamples: int, scratch: Path) -> list[dict[str, Any]]:
    """One row per case and way of padding."""
    opened = open_detector("embedded")
    scenes = make_scenes(data, n_scenes, 0, "val")
    images = Images(scenes, transforms_for(opened.spec.image_size)[1])
    detector: Any = opened.model
    rows: list[dict[str, Any]] = []
    ways = [(case, way) for case in CASES for way in (ALONE, APART, MERGED) if way != MERGED or case[1] is not None]
    with progress(len(ways), NAME) as advance:
        for (method, rate), way in ways:
            agglo.remove(detector)
            detector.backbone.padding = "merge" if way == MERGED else "apart"
            if rate is not None:
                agglo.apply(detector, method, keep_rate=rate)
            folder = scratch / f"{method}-{rate}-{way}"

            def keep(results: list[dict[str, Any]], folder: Path = folder) -> None:
                folder.mkdir(parents=True)
                for kind, name in KINDS.items():
                    match(scenes.ground_truth, results, kind).save(folder / f"{name}.npz")

            found = evaluate(detector if way == ALONE else Beside(detector), images, keep=keep)
            ours, alone = (samples_in(each, resamples) for each in (folder, scratch / f"{method}-{rate}-{ALONE}"))
            row: dict[str, Any] = {"method": method, "keep_rate": rate, "way": way}
            row |= {f"{kind}_AP": found[f"{kind}_AP"] for kind in KINDS.values()}
            row["to_alone"] = {kind: interval(ours[kind] - alone[kind]) for kind in KINDS.values()}
            rows.append(row)
            advance(f"{method} {way}")
    return rows


def table(record: Mapping[str, Any]) -> str:
    """AP by way of padding, with intervals of the difference to the scenes alone."""
    columns = [Column("reduced", left=True), Column("scenes", left=True), *(Column(f"{k} AP") for k in KINDS.values())]
    rows = []
    for row in record["rows"]:
        rate = "" if row["keep_rate"] is None else f" {row['keep_rate']:.0%}"
        rows.append([f"{row['method']}{rate}", _way(row), *(_told(row, kind) for kind in KINDS.values())])
    found = record["machine"]
    head = (
        f"{record['scenes']} scenes of the miniature, each alone and beside one of twice the width "
        f"(`make padding-effect`, {found['cpu']}, {found['date'][:10]}); in brackets the 95 % interval of the "
        "difference to the scenes alone:"
    )
    return f"{head}\n\n{Table(columns, rows).markdown()}"


def _way(row: Mapping[str, Any]) -> str:
    return "padded" if row["keep_rate"] is None and row["way"] == APART else str(row["way"])


def _told(row: Mapping[str, Any], kind: str) -> str:
    told = f"{row[f'{kind}_AP']:.1f}"
    if row["way"] == ALONE:
        return told
    low, high = row["to_alone"][kind]
    return f"{told} [{low:+.1f}, {high:+.1f}]"


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--scenes", type=int, default=150, help="(default: %(default)s)")
    parser.add_argument("--resamples", type=int, default=500, help="for intervals (default: %(default)s)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        rows = measure(arguments.data, arguments.scenes, arguments.resamples, Path(scratch))
    record = {"machine": machine(), "scenes": arguments.scenes, "resamples": arguments.resamples, "rows": rows}
    write_json(RECORD, record)
    write_between_marks(PAGE, NAME, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
