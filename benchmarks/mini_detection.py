"""Detection in miniature: a small detector of garments in scenes, with every method, off the shelf and fine-tuned.

    make mini-detection DATA=fashion-mnist

In this order:
1. The dense detector of each seed is trained (recipe `miniature`, with a class token, so that one detector serves all
   methods) and passes the gate: with all tokens collapsed to one it must lose a third of its box and mask AP. If it
   does not, the ViT hardly matters to it and it ranks nothing: the study stops, and its page says "not ranked".
2. Off the shelf: methods that learn nothing, at four keep rates, one rate after the other.
3. Fine-tuned: every method trains on with few tokens, and the dense detector as long without.

Every cell is kept when it is done, and training runs keep checkpoints: what was stopped or killed goes on with the same
command. More --seeds and --tuned-keep-rate extend a study; what decides the numbers cannot change within one record.
results/mini-detection/ then holds record.json, and ap.png if the gate is passed; docs/mini-detection.md the tables.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from agglo.detection.evaluation.one_pass import KINDS
from agglo.detection.training.preparation import build_model, open_splits, training_data
from agglo.detection.training.trainer import train_detector
from agglo.experiments.checkpoints import fingerprint, read_checkpoint
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.training.batches import Share
from benchmarks import mini_detection_report as report
from benchmarks.mini_detection_cells import dense_settings, is_kept, measure, scenes
from benchmarks.mini_detection_plan import DENSE, ENTRIES, SHELF, TUNED, Cell, Plan, Study
from benchmarks.mini_detection_record import Record, compared, gate


def run(study: Study, plan: Plan, record: Record, jobs: int, *, despite_gate: bool) -> bool:
    """All that is missing; whether the gate was passed by every seed."""
    seeds = range(plan.seeds)
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (jobs, study.runs / "training.log")) as pool:
        _trained(study, record, seeds, pool)
        _measured(study, record, [cell for seed in seeds for cell in plan.gate(seed)], pool)
        gates = [_passes(study, plan, record, seed) for seed in seeds]  # each is noted
        if all(gates) or despite_gate:
            for cells in plan.stages():
                _measured(study, record, cells, pool)
                record.compare(compared(study, record))
    return all(gates)


def _passes(study: Study, plan: Plan, record: Record, seed: int) -> bool:
    found = gate(study, plan, record, seed)
    record.add_gate(found)
    told = " and ".join(f"{found[kind]['lost']:.0%} of {kind} AP" for kind in KINDS.values())
    print(f"seed {seed}: a single token costs {told}; a third of both is needed", file=sys.stderr)
    return bool(found["passed"])


def _trained(study: Study, record: Record, seeds: Sequence[int], pool: ProcessPoolExecutor) -> None:
    """The dense detectors, side by side: several processes of one thread do more steps than one of several threads."""
    futures = {pool.submit(train_dense, study, seed): seed for seed in seeds}
    with progress(len(futures), "dense training") as advance, _giving_up(pool):
        for future in as_completed(futures):
            seed = futures[future]
            record.add_dense(seed, fingerprint(read_checkpoint(study.dense_weights(seed))), future.result())
            advance(f"seed {seed}")


def train_dense(study: Study, seed: int) -> list[dict[str, float]]:
    """The dense detector of a seed, or what is left of its training, and its log. One that is done returns at once."""
    folder = study.dense_run(seed)
    train_detector(dense_settings(study, seed), study.data, folder)
    with (folder / "log.csv").open(encoding="utf-8") as file:
        return [{name: float(row[name]) for name in ("epoch", "box_AP", "mask_AP")} for row in csv.DictReader(file)]


@contextmanager
def _giving_up(pool: ProcessPoolExecutor) -> Iterator[None]:
    """What has not begun does not begin after a failure."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def missing(study: Study, record: Record, cells: Sequence[Cell]) -> list[Cell]:
    """Cells that the record does not hold, or whose match tables are gone: nothing could be compared with them."""
    return [
        cell
        for cell in cells
        if (found := record.find(cell)) is None or not ("cannot" in found or is_kept(study, cell))
    ]


def _measured(study: Study, record: Record, cells: Sequence[Cell], pool: ProcessPoolExecutor) -> None:
    todo = missing(study, record, cells)
    if not todo:
        return
    futures = {pool.submit(measure, study, cell): cell for cell in todo}
    with progress(len(cells), cells[-1].part, start=len(cells) - len(todo)) as advance, _giving_up(pool):
        for future in as_completed(futures):
            cell, found = futures[future], future.result()
            record.add(cell, found)
            advance(f"{cell.title}: {'cannot' if 'cannot' in found else format(found['box_AP'], '.1f')}")


def _begin_worker(jobs: int, log: Path) -> None:
    """Share the cores, and write the trainer's own progress where it does not get in the way."""
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """A study that is killed leaves nobody behind who would train beside the one that goes on."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def estimate(study: Study, plan: Plan, record: Record, jobs: int) -> str:
    """How long what is missing will take, from a few steps and scenes timed here, before training.

    An untrained detector finds as much as it may, so that evaluation comes out a little too long.
    """
    small = replace(study, scenes=16, validation=4)
    settings = dense_settings(small, 0)
    splits = open_splits(settings, study.data)
    model = build_model(settings, splits.train.classes)
    images, targets = next(training_data(settings, splits, Share(settings.batch_size, 1, 1, 0)).batches(0, 0, 1))

    def step() -> None:
        losses: Any = model.train()(images, targets)
        torch.stack(list(losses.values())).sum().backward()

    @torch.inference_mode()
    def look() -> None:
        model.eval()([next(iter(scenes(small)))[1][0]])

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // jobs))
    try:
        of_one, of_scene = _seconds(step), _seconds(look)
    finally:
        torch.set_num_threads(threads)
    batch = settings.batch_size
    dense = of_one * study.scenes * study.epochs / batch
    judging = of_scene * study.validation
    tuning = of_one * study.tuning_scenes * study.tuning_epochs / batch
    todo = missing(study, record, plan.cells())
    parts = {
        "dense training": dense
        * sum(not (study.dense_run(seed) / "result.json").is_file() for seed in range(plan.seeds))
        / jobs,
        SHELF: judging * sum(cell.part != TUNED for cell in todo) / jobs,
        TUNED: (tuning + judging) * sum(cell.part == TUNED for cell in todo) / jobs,
    }
    told = ", ".join(f"{part} {seconds / 3600:.1f}" for part, seconds in parts.items())
    return (
        f"about {sum(parts.values()) / 3600:.1f} hours are left ({told}): in one of {jobs} processes a step of "
        f"{batch} scenes takes {of_one:.2f} s, a scene {of_scene:.3f} s"
    )


def _seconds(work: Any) -> float:
    """Of the faster one of two, after one that warms up."""
    work()
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def forget(study: Study, plan: Plan, record: Record, names: Sequence[str]) -> None:
    """Measure some entries anew: away with their results and runs."""
    for cell in plan.cells():
        if cell.name in names:
            shutil.rmtree(cell.folder(study), ignore_errors=True)
            record.remove(cell)


def parser() -> argparse.ArgumentParser:
    usual, how_far = Study(Path(), Path()), Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--runs", type=Path, default=Path("runs/mini-detection"), help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time, sharing the cores (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=how_far.seeds, help="of training (default: %(default)s)")
    for name, about in (
        ("scenes", "of the dense training"),
        ("epochs", "of the dense training"),
        ("tuning-scenes", "of each fine-tuning"),
        ("tuning-epochs", "of each fine-tuning"),
        ("validation", "scenes that judge"),
        ("resamples", "of these scenes, for intervals"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default: %(default)s)")
    for name, rates in (("keep-rate", how_far.shelf_rates), ("tuned-keep-rate", how_far.tuned_rates)):
        told, several = ("off the shelf", "+") if rates is how_far.shelf_rates else ("fine-tuned; may be empty", "*")
        parser.add_argument(
            f"--{name}", type=float, nargs=several, default=list(rates), help=f"{told} (default: %(default)s)"
        )
    names = [DENSE.name, *(entry.name for entry in ENTRIES)]
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=names,
        metavar="ENTRY",
        help="measure these anew, after a change of a method; all other results stay. dense is not trained anew",
    )
    parser.add_argument(
        "--despite-gate", action="store_true", help="go on where the gate is not passed; nothing is ranked"
    )
    parser.add_argument("--estimate", action="store_true", help="say how long it will take, and stop")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    numbers = ("scenes", "epochs", "tuning_scenes", "tuning_epochs", "validation", "resamples")
    study = Study(arguments.data, arguments.runs, **{name: getattr(arguments, name) for name in numbers})
    plan = Plan(arguments.seeds, tuple(arguments.keep_rate), tuple(arguments.tuned_keep_rate))
    arguments.output.mkdir(parents=True, exist_ok=True)
    study.runs.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.output / "record.json", study, plan, machine())
    forget(study, plan, record, arguments.only)
    print(estimate(study, plan, record, arguments.jobs), file=sys.stderr)
    if arguments.estimate:
        return
    passed = run(study, plan, record, arguments.jobs, despite_gate=arguments.despite_gate)
    report.write(arguments.output)
    if arguments.output == report.RESULTS:
        report.write_page()
    if not passed:
        raise SystemExit("the gate is not passed: the ViT hardly matters to this detector, and nothing is ranked")


if __name__ == "__main__":
    main()
