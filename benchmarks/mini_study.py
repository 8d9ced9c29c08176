"""The study in miniature: every method at four keep rates on the embedded model, off the shelf and fine-tuned.

    make mini-study DATA=fashion-mnist

Off the shelf, methods that learn nothing are evaluated as they are. Fine-tuned, every method trains for one short epoch
(mini_study.toml) on the first images of the training set. Both are evaluated on the first images of the test set. Every
cell is kept when it is done: a study that was stopped goes on. Takes an hour or two on two cores.

results/mini-study/ then holds off-the-shelf.json, fine-tuned.json, tables.md, accuracy.png, ranks.png, difference.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mini_study_report

import agglo
from agglo.classification import evaluation_grid, recipes
from agglo.classification.datasets.fashion_mnist import find_idx, read_idx, write_idx
from agglo.classification.run_folder import RunFolder
from agglo.classification.training import finetune
from agglo.demo.show import EMBEDDED
from agglo.methods import create
from agglo.study.model_loading import build
from agglo.study.progress import progress
from agglo.study.records import machine, write_json
from agglo.study.variants import Variant

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mini-study"
KEEP_RATES = (0.25, 0.5, 0.7, 0.9)
IMAGES = {"train": 6000, "t10k": 2000}


class Entry(NamedTuple):
    """One line of the tables. learns: nothing can be said about it off the shelf."""

    name: str
    method: str
    linkage: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    learns: bool = False

    @property
    def all_options(self) -> dict[str, Any]:
        """What the method is created with."""
        return {**self.options, **({} if self.linkage is None else {"linkage": self.linkage})}


ENTRIES = (
    Entry("l1", "l1"),
    Entry("l2", "l2"),
    Entry("linf", "linf"),
    Entry("random", "random", options={"seed": 0}),
    Entry("topk", "topk"),
    Entry("evit", "evit"),
    Entry("dynamicvit", "dynamicvit", learns=True),
    Entry("dynamicvit_prsv", "dynamicvit_prsv", learns=True),
    Entry("ats", "ats"),
    Entry("svit", "svit", learns=True),
    Entry("evovit", "evovit"),
    Entry("sit", "sit", learns=True),
    Entry("patch_merger", "patch_merger", learns=True),
    Entry("sinkhorn", "sinkhorn", learns=True),
    Entry("pool", "pool"),
    Entry("kmedoids", "kmedoids"),
    Entry("dpc_knn", "dpc_knn", learns=True),
    Entry("dpc_knn equal", "dpc_knn", options={"weights": "equal"}),
    Entry("tome", "tome"),
    Entry("atc single", "atc", "single"),
    Entry("atc average", "atc", "average"),
    Entry("atc complete", "atc", "complete"),
)


def write_subset(source: Path, target: Path) -> Path:
    """The first images of both splits, as idx files of their own."""
    target.mkdir(parents=True, exist_ok=True)
    for prefix, count in IMAGES.items():
        for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
            values = read_idx(find_idx(source, f"{prefix}-{kind}-ubyte"), dimensions)[:count]
            write_idx(target / f"{prefix}-{kind}-ubyte.gz", values)
    return target


def off_the_shelf(data: Path) -> dict[str, Any]:
    """Every entry without parameters at every rate; one evaluation, which goes on where it was."""
    variants = [
        Variant(entry.name, create(entry.method, **entry.all_options), keep_rate=rate)
        for rate in KEEP_RATES
        for entry in ENTRIES
        if not entry.learns
    ]
    settings = evaluation_grid.Settings(EMBEDDED, data, variants)
    return evaluation_grid.run(settings, RESULTS / "off-the-shelf.json")


def fine_tuned(data: Path, runs: Path) -> dict[str, Any]:
    """Every entry trained at every rate it can reach, and the dense model trained alike."""
    recipe = recipes.load(str(HERE / "mini_study.toml"))
    cells = [(Entry("dense", "none"), None)] + [(entry, rate) for rate in KEEP_RATES for entry in ENTRIES]
    path = RESULTS / "fine-tuned.json"
    results: list[dict[str, Any]] = []
    with progress(len(cells), "fine-tuned") as advance:
        for entry, rate in cells:
            choices: dict[str, Any] = {"method": entry.method}
            if rate is not None:
                choices |= {"keep_rate": rate, "method_options": dict(entry.options)}
            if entry.linkage is not None:
                choices["linkage"] = entry.linkage
            settings, _ = recipe.resolve(choices)
            result: dict[str, Any] = {"name": entry.name, "keep_rate": rate}
            try:
                found = reach(entry, rate)
                folder = RunFolder(runs / f"{entry.name.replace(' ', '-')}-{rate}")
                best = folder.result() or finetune(settings, data, folder.path)
                results.append({**result, **found, "top1": best["top1"]})
            except UnreachableError as error:
                results.append({**result, "cannot": str(error)})
            write_json(path, {"machine": machine(), "images": IMAGES, "results": results})
            advance(f"{entry.name} {'' if rate is None else rate} {results[-1].get('top1', 'cannot')}")
    return json.loads(path.read_text(encoding="utf-8"))


class UnreachableError(Exception):
    """A method cannot leave so few tokens."""


def reach(entry: Entry, rate: float | None) -> dict[str, Any]:
    """Tokens after each block and GFLOPs of a cell."""
    model = build(EMBEDDED)
    try:
        agglo.apply(model, "atc" if rate is None else entry.method, keep_rate=rate or 1.0, **entry.all_options)
    except ValueError as error:
        raise UnreachableError(str(error)) from error
    found = agglo.reduction(model)
    assert found is not None
    return {"counts": found.counts, "gflops": found.gflops_after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's four idx files")
    parser.add_argument("--runs", type=Path, default=Path("runs/mini-study"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    data = write_subset(arguments.data, arguments.runs / "data")
    shelf = off_the_shelf(data)
    tuned = fine_tuned(data, arguments.runs)
    print(mini_study_report.write(shelf, tuned, RESULTS))


if __name__ == "__main__":
    main()
