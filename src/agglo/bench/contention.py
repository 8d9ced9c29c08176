"""The clustering's threads beside busy processes, as data loaders are: never much slower than one thread."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

from agglo.bench.clustering import by_agglo, parse_size, spatial_tokens
from agglo.clustering.distances import pairwise
from agglo.experiments.devices import torch_threads
from agglo.experiments.files import write_json
from agglo.experiments.machine import machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table

AT_MOST = 1.2  # times as long as one thread may several take while other processes are busy
_BUSY = "import os\nos.nice(10)\nwhile True: pass"


@dataclass
class Contention:
    """Seconds of a call on one thread and on several, taken in turns beside some busy processes of low priority."""

    busy_processes: int
    batch: int
    n: int
    threads: int
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        return statistics.median(self.together) / statistics.median(self.alone)


def measure_contention(batch: int, n: int, threads: int, busy_processes: int, repeats: int) -> Contention:
    distances = pairwise(spatial_tokens(batch, n), "cosine")
    result = Contention(busy_processes, batch, n, threads)
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(busy_processes)]
    try:
        time.sleep(0.5)  # until they have started and their priority is set
        for _ in range(repeats):
            for count, seconds in ((1, result.alone), (threads, result.together)):
                with torch_threads(count):
                    by_agglo(distances, n // 2, "average")
                    begin = time.perf_counter()
                    for _ in range(10):
                        by_agglo(distances, n // 2, "average")
                    seconds.append((time.perf_counter() - begin) / 10)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return result


def report(results: list[Contention], bullet: str = "") -> str:
    """A table, and for each goal whether it was met, each line behind a bullet."""
    columns = [Column("busy processes"), Column("B x N"), Column("1 thread, ms per image", ".3f"), Column("threads")]
    columns += [Column("ms per image", ".3f"), Column("ratio", ".2f")]
    rows, goals = [], []
    for result in results:
        alone, together = (statistics.median(times) / result.batch * 1e3 for times in (result.alone, result.together))
        size = f"{result.batch} x {result.n}"
        rows.append([result.busy_processes, size, alone, result.threads, together, result.ratio()])
        if result.busy_processes:
            met = "met" if result.ratio() <= AT_MOST else "MISSED"
            where = f"{result.threads} threads beside {result.busy_processes} busy processes, {size}"
            goals.append(f"{bullet}{met}: {where}: {result.ratio():.2f}x one thread (at most {AT_MOST:g}x)")
    return "\n".join([Table(columns, rows).markdown(), *(["", *goals] if goals else [])])


def run_contended(arguments: argparse.Namespace) -> int:
    """How threads fare beside 0, 1 and 2 busy processes."""
    sizes = [parse_size(size) for size in arguments.sizes]
    results = []
    with progress(3 * len(sizes), "timed") as advance:
        for batch, n in sizes:
            for busy in range(3):
                results.append(measure_contention(batch, n, arguments.threads, busy, arguments.repeats))
                advance(f"{batch} x {n}, {busy} busy processes")
    print(report(results))
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "contention": [asdict(result) for result in results]})
    return 0
