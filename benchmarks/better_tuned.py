"""The better ATC beside the paper's, both fine-tuned on the embedded model: four keep rates, three seeds.

    make better-tuned DATA=fashion-mnist

Training, images and recipe are those of the study in miniature (mini_study.toml). Every cell is kept when it is done,
and training goes on from its checkpoint: what was stopped goes on with the same command.

The record goes to results/better-tuned.json, the table into docs/mini-study.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from agglo.classification.training import recipe as recipes
from agglo.classification.training.trainer import finetune
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table
from benchmarks.marks import write_between_marks
from benchmarks.mini_study import IMAGES, KEEP_RATES, Entry, reach, write_subset

HERE = Path(__file__).parent
RECORD = HERE / "results" / "better-tuned.json"
PAGE = HERE.parent / "docs" / "mini-study.md"
NAME = "better"
OPTIONS = {"features": "tokens", "importance": "class", "mean": "preserve_norm"}
PAPERS = Entry("the paper's ATC", "atc", "average")
BETTER = Entry("the better ATC", "atc", "average", options=OPTIONS)
ENTRIES = (PAPERS, BETTER)
SEEDS = 3


def train(number: int, rate: float, seed: int, data: Path, runs: Path) -> dict[str, Any]:
    """One cell, or what is left of it. number: of the entry, which cannot be sent to another process."""
    entry = ENTRIES[number]
    choices: dict[str, Any] = {"method": entry.method, "linkage": entry.linkage, "keep_rate": rate, "seed": seed}
    settings, _ = recipes.load(str(HERE / "mini_study.toml")).resolve(
        {**choices, "method_options": dict(entry.options)}
    )
    folder = runs / f"{'better' if entry.options else 'paper'}-{rate}-seed{seed}"
    found = finetune(settings, data, folder)
    return {"name": entry.name, "keep_rate": rate, "seed": seed, "top1": found["top1"], **reach(entry, rate)}


def run(data: Path, runs: Path, jobs: int) -> dict[str, Any]:
    """All cells that the record does not hold."""
    results: list[dict[str, Any]] = load()["results"] if RECORD.exists() else []
    done = {(result["name"], result["keep_rate"], result["seed"]) for result in results}
    cells = list(product(range(SEEDS), KEEP_RATES, range(len(ENTRIES))))
    todo = [(number, rate, seed) for seed, rate, number in cells if (ENTRIES[number].name, rate, seed) not in done]
    record: dict[str, Any] = {}
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (jobs, runs / "training.log")) as pool,
        progress(len(cells), "fine-tuned", start=len(cells) - len(todo)) as advance,
    ):
        futures = [pool.submit(train, *cell, data, runs) for cell in todo]
        try:
            for future in as_completed(futures):
                results.append(future.result())
                results.sort(key=lambda result: (result["keep_rate"], result["name"], result["seed"]))
                record = {"machine": machine(), "images": IMAGES, "options": OPTIONS, "results": results}
                write_json(RECORD, record)
                advance("{name} {keep_rate:.0%} seed {seed}: {top1:.2f}".format(**future.result()))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return record or load()


def _begin_worker(jobs: int, log: Path) -> None:
    """Share the cores, and write the trainer's own progress where it does not get in the way."""
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)


def compared(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per keep rate that is complete: accuracies by seed of both, and their difference seed by seed with its standard
    error."""
    found = {(result["name"], result["keep_rate"], result["seed"]): result["top1"] for result in record["results"]}
    rows = []
    for rate in sorted({result["keep_rate"] for result in record["results"]}, reverse=True):
        if any((entry.name, rate, seed) not in found for entry in ENTRIES for seed in range(SEEDS)):
            continue
        papers, better = ([found[entry.name, rate, seed] for seed in range(SEEDS)] for entry in ENTRIES)
        gains = [ours - its for its, ours in zip(papers, better, strict=True)]
        rows.append(
            {"keep_rate": rate, "papers": papers, "better": better, "gain": mean(gains), "error": _error(gains)}
        )
    return rows


def _error(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values))


def table(record: Mapping[str, Any]) -> str:
    columns = [Column("keep rate"), *(Column(entry.name) for entry in ENTRIES), Column("difference")]
    rows = [
        [
            f"{row['keep_rate']:.0%}",
            *(f"{mean(row[name]):.2f} ({stdev(row[name]):.2f})" for name in ("papers", "better")),
            f"{row['gain']:+.2f} +- {row['error']:.2f}",
        ]
        for row in compared(record)
    ]
    ran = record["machine"]
    head = (
        f"Fine-tuned top-1, mean of {SEEDS} seeds and in brackets their standard deviation; the difference is taken "
        f"seed by seed, +- its standard error (`make better-tuned`, {ran['cpu']}, {ran['date'][:10]}):"
    )
    return f"{head}\n\n{Table(columns, rows).markdown()}"


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's four idx files")
    parser.add_argument("--runs", type=Path, default=Path("runs/better-tuned"), help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, sharing the cores (default: %(default)s)")
    arguments = parser.parse_args()
    data = write_subset(arguments.data, arguments.runs / "data")
    record = run(data, arguments.runs, arguments.jobs)
    write_between_marks(PAGE, NAME, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
