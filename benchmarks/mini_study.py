"""The study in miniature: every method at four keep rates on the embedded model, off the shelf and fine-tuned.

    make mini-study DATA=fashion-mnist

Off the shelf, methods that learn nothing are evaluated as they are. Fine-tuned, every method trains for one short epoch
(mini_study.toml) on the first 6000 images of the training set. Both are evaluated on the test set. Every cell is kept
when it is done: a study that was stopped goes on. Takes about two hours on two cores.

results/mini-study/ then holds off-the-shelf.json, fine-tuned.json, tables.md, accuracy.png, ranks.png, difference.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import agglo
from agglo.classification.evaluation import grid
from agglo.classification.training import recipe as recipes
from agglo.classification.training.trainer import finetune
from agglo.demo.show import EMBEDDED
from agglo.experiments.evaluation.record import processor
from agglo.experiments.fashion_mnist import find_idx, read_idx, write_idx
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.models import build
from agglo.experiments.progress import progress
from agglo.experiments.variants import Variant
from agglo.methods import create
from benchmarks import mini_study_report
from benchmarks.marks import write_between_marks

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mini-study"
PAGE = HERE.parent / "docs" / "mini-study.md"
KEEP_RATES = (0.25, 0.5, 0.7, 0.9)
IMAGES = {"train": 6000, "t10k": 10_000}


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
# Of the fine-tuned table; the dense model is trained alike.
CELLS: tuple[tuple[Entry, float | None], ...] = (
    (Entry("dense", "none"), None),
    *((entry, rate) for rate in KEEP_RATES for entry in ENTRIES),
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
    settings = grid.EvaluationSettings(EMBEDDED, data, variants)
    return grid.run(settings, RESULTS / "off-the-shelf.json")


def _forget(path: Path, names: Collection[str]) -> None:
    """Take the results of some entries out of an evaluation, which then measures them again."""
    before = json.loads(path.read_text(encoding="utf-8"))
    for part in ("results", "cannot"):
        before[part] = [result for result in before.get(part, []) if result["name"] not in names]
    write_json(path, before)


def fine_tuned(data: Path, runs: Path, jobs: int, only: Collection[str]) -> dict[str, Any]:
    """Every entry trained at every rate it can reach, and the dense model trained alike.

    only: entries to train; the cells of all others stay as the file has them. Empty trains every entry.
    """
    path = RESULTS / "fine-tuned.json"
    results: dict[int, dict[str, Any]] = _kept(path, only) if only else {}
    # Small models leave much of a core to waiting for the others: several runs of fewer threads are faster.
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (jobs, runs / "training.log")) as pool,
        progress(len(CELLS), "fine-tuned", start=len(results)) as advance,
    ):
        missing = [number for number in range(len(CELLS)) if number not in results]
        if only:
            missing.sort(key=lambda number: list(only).index(CELLS[number][0].name))  # as they were typed
        futures = {pool.submit(train, number, data, runs): number for number in missing}
        try:
            for future in as_completed(futures):
                result = {**future.result(), "processor": processor(machine())}
                results[futures[future]] = result
                ordered = [results[number] for number in sorted(results)]
                write_json(path, {"machine": machine(), "images": IMAGES, "jobs": jobs, "results": ordered})
                rate = "" if result["keep_rate"] is None else f"{result['keep_rate']:.0%} "
                advance(f"{result['name']} {rate}{result.get('top1', 'cannot')}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return json.loads(path.read_text(encoding="utf-8"))


def _kept(path: Path, only: Collection[str]) -> dict[int, dict[str, Any]]:
    """Cells of the file that are not to be trained, by their number."""
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["images"] != IMAGES:
        raise ValueError(f"{str(path)!r} is of {before['images']} images, not {IMAGES}: train every entry")
    # Results of before they said so ran on the processor of their file.
    ran_on = {"processor": processor(before["machine"])}
    found = {(result["name"], result["keep_rate"]): {**ran_on, **result} for result in before["results"]}
    kept = {
        number: found.get((entry.name, rate)) for number, (entry, rate) in enumerate(CELLS) if entry.name not in only
    }
    return {number: result for number, result in kept.items() if result is not None}


def _begin_worker(jobs: int, log: Path) -> None:
    """Share the cores, and write the trainer's own progress where it does not get in the way."""
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)


def train(number: int, data: Path, runs: Path) -> dict[str, Any]:
    """One cell of the table, or what is left of it."""
    entry, rate = CELLS[number]
    choices: dict[str, Any] = {"method": entry.method}
    if rate is not None:
        choices |= {"keep_rate": rate, "method_options": dict(entry.options)}
    if entry.linkage is not None:
        choices["linkage"] = entry.linkage
    settings, _ = recipes.load(str(HERE / "mini_study.toml")).resolve(choices)
    result: dict[str, Any] = {"name": entry.name, "keep_rate": rate}
    try:
        found = reach(entry, rate)
    except UnreachableError as error:
        return {**result, "cannot": str(error)}
    folder = runs / f"{entry.name.replace(' ', '-')}-{rate}"
    # One that is done returns at once, after a look at whether it was this one.
    return {**result, **found, "top1": finetune(settings, data, folder)["top1"]}


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
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, sharing the cores (default: %(default)s)")
    names = [entry.name for entry, _ in CELLS]
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=sorted(set(names)),
        metavar="ENTRY",
        help="measure these anew, after a change of a method, and keep all other results",
    )
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    data = write_subset(arguments.data, arguments.runs / "data")
    if arguments.only and (RESULTS / "off-the-shelf.json").exists():
        _forget(RESULTS / "off-the-shelf.json", arguments.only)
    shelf = off_the_shelf(data)
    tuned = fine_tuned(data, arguments.runs, arguments.jobs, arguments.only)
    print(mini_study_report.write(shelf, tuned, RESULTS))
    write_between_marks(PAGE, "tables", mini_study_report.page(shelf, tuned))


if __name__ == "__main__":
    main()
