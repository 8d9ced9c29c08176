"""Merging before attention beside merging after it, at equal cost: the same classifier, images and family of schedules.

    make places CHECKPOINT=deit_tiny_patch16_224.safetensors IMAGES=imagenet

Before a block, fewer tokens enter its attention, so a schedule may leave more of them for the same GFLOPs; but keys are
not there yet, and tokens are compared by themselves. Schedules are geometric, from block 3 to the last one; how far
they fall follows from the GFLOPs.

The record goes to results/places.json, the table into docs/tune.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.models import ModelSpec
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table
from agglo.tuning.classifiers import FolderSettings, prepare
from agglo.tuning.images import split
from agglo.tuning.points import Solver
from agglo.tuning.space import Axis, Space
from agglo.tuning.statistics import quality_from
from agglo.tuning.subject import Subject
from benchmarks.marks import write_between_marks

RECORD = Path(__file__).parent / "results" / "places.json"
PAGE = Path(__file__).parents[1] / "docs" / "tune.md"
NAME = "places"
LEVELS = (0.7, 0.5)  # of the dense model's GFLOPs
BEFORE = {"acts": "before block"}
TOKENS = {"features": "tokens"}
BETTER = {**TOKENS, "importance": "class", "mean": "preserve_norm"}
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("atc", {}),
    ("atc", TOKENS),
    ("atc", {**TOKENS, **BEFORE}),
    ("atc", BETTER),
    ("atc", {**BETTER, **BEFORE}),
    ("tome", {}),
    ("tome", TOKENS),
    ("tome", {**TOKENS, **BEFORE}),
)
SHAPE: tuple[dict[str, Any], ...] = ({"curve": "geometric"}, {"start": 3}, {"last": 11}, {"stride": 1})


def measure(settings: FolderSettings) -> list[dict[str, Any]]:
    """One row per level and way."""
    ready = prepare(settings)
    images = split(ready.images, ready.labels, batch_size=settings.batch_size)
    subject = Subject(ready.model, images, output=ready.output, objective="kl", tower=None, n_tokens=None)
    rows = []
    with progress(len(LEVELS) * len(WAYS), NAME) as advance:
        for level in LEVELS:
            for method, options in WAYS:
                space = Space(
                    method, [Axis(next(iter(value)), (value,)) for value in SHAPE], {**options, "unread": "drop"}
                )
                point = Solver(subject, {method: space}, by_time=False).solve(space.first(), level)
                found = subject.quality(point.arguments, [*images.search, *images.confirmation])
                rows.append({"level": level, **_about(point.arguments, point.cost.gflops), "quality": found.as_dict()})
                advance(f"{method} at {level}: KL {found.distance:.3f}")
    return rows


def _about(arguments: Mapping[str, Any], gflops: float) -> dict[str, Any]:
    return {"arguments": dict(arguments), "gflops": gflops}


def table(record: Mapping[str, Any]) -> str:
    """KL and points lost, one line per way, one pair of columns per level."""
    columns = [Column("method", left=True), Column("acts", left=True)]
    columns += [Column(f"{what} at {level:g}") for level in LEVELS for what in ("KL", "points lost")]
    by_way: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        arguments = row["arguments"]
        options = ", ".join(f"{name}={arguments[name]}" for name in BETTER if name in arguments)
        place = arguments.get("acts", "after attention")
        found = quality_from(row["quality"])
        assert found.drop is not None
        by_way.setdefault((f"{arguments['method']} {options}".strip(), place), []).extend(
            [
                f"{found.distance:.3f} +- {found.distance_error:.3f}",
                f"{found.drop.points:.1f} +- {found.drop.error:.1f}",
            ]
        )
    ran = record["machine"]
    head = (
        f"{record['model']}, {record['images']} images, geometric schedules from block 3 that cost 0.7 and 0.5 of the "
        f"dense model's GFLOPs (`make places`, {ran['cpu']}, {ran['date'][:10]}); +- one standard error:"
    )
    return f"{head}\n\n{Table(columns, [[*way, *cells] for way, cells in by_way.items()]).markdown()}"


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="of DeiT-Tiny")
    parser.add_argument("--data", type=Path, required=True, help="folder of ImageNet's validation images")
    parser.add_argument("--images", type=int, default=1000, help="(default: %(default)s)")
    arguments = parser.parse_args()
    spec = ModelSpec("deit_tiny_patch16_224", arguments.checkpoint)
    rows = measure(FolderSettings(spec, arguments.data, images=arguments.images))
    record = {"machine": machine(), "model": spec.name, "images": arguments.images, "rows": rows}
    write_json(RECORD, record)
    write_between_marks(PAGE, NAME, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
