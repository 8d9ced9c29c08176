"""How long a visitor of `agglo play` waits after a move of the slider.

Starts the page in a process of its own and asks it as a browser does, through its queue: the time from the request to
the whole answer, with the groups of two methods as pictures, the numbers and the tree. Every move is to another keep
rate, so that nothing can be remembered. What the browser then takes to draw it is not in it. Beside it stands the
processor time of the page's process, which says how long it takes on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from agglo.experiments.files import require_output, write_json
from agglo.experiments.machine import load_warning, machine
from agglo.experiments.progress import progress
from agglo.experiments.tables import Column, Table

WANTED = 300.0  # milliseconds that nobody is to wait for longer
_PICTURES = ("example:boot", "example:pullover", "example:bag")
_SIDES = {
    "atc beside tome": ("atc", "average", "tome", "average"),
    "atc beside atc": ("atc", "single", "atc", "complete"),
}
_WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=40, help="moves of the slider (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="every timing, and the machine")


def run(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 2:
        raise ValueError(f"repeats={arguments.repeats} must be at least 2")
    if arguments.json is not None:
        require_output(arguments.json)
    from gradio_client import Client

    where = machine()
    with _page() as (address, process):
        visitor = Client(address, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 120})
        # Until all models are made, which the page does by itself after it has opened.
        visitor.predict("Bag", 0, 0.5, "average", "none", api_name="/synthesis")
        results = []
        with progress(len(_SIDES) * arguments.repeats, "bench playground") as advance:
            for name, sides in _SIDES.items():
                for rate in _rates(_WARM_UP):
                    _move(visitor, _PICTURES[0], rate, sides)
                begin, taken = _processor_seconds(process), []
                for number, rate in enumerate(_rates(arguments.repeats)):
                    taken.append(_move(visitor, _PICTURES[number % len(_PICTURES)], rate, sides))
                    advance(f"{name}: {taken[-1]:.0f} ms")
                end = _processor_seconds(process)
                own = None if begin is None or end is None else (end - begin) * 1e3 / len(taken)
                results.append({"name": name, "milliseconds": taken, "processor_ms_per_move": own})
    if arguments.json is not None:
        write_json(arguments.json, {"machine": where, "wanted_ms": WANTED, "results": results})
    if (busy := load_warning(where)) is not None:
        print(busy)
    print(where)
    print(table(results).markdown())


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Milliseconds per move."""
    columns = [Column("what is shown", left=True), Column("median, ms", ".0f"), Column("95 of 100 below", ".0f")]
    columns += [Column("longest", ".0f"), Column(f"within {WANTED:.0f} ms", ".0%")]
    columns += [Column("processor time of the page, ms", ".0f")]
    rows = []
    for result in results:
        taken = result["milliseconds"]
        within = sum(each <= WANTED for each in taken) / len(taken)
        slow = quantiles(taken, n=20, method="inclusive")[-1]
        rows.append([result["name"], median(taken), slow, max(taken), within, result["processor_ms_per_move"]])
    return Table(columns, rows)


def _processor_seconds(process: subprocess.Popen[str]) -> float | None:
    """That a process has taken so far, which others do not change much; None where there is no Linux to tell."""
    path = Path(f"/proc/{process.pid}/stat")
    if not path.exists():
        return None
    # The name, in brackets, may hold blanks: fields are counted behind it.
    fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rates(count: int) -> Sequence[float]:
    """Keep rates from 0.5 to 0.95, back and forth, no two alike in a row."""
    return [0.5 + 0.05 * (number * 3 % 10) for number in range(count)]


def _move(visitor: Any, picture: str, rate: float, sides: Sequence[str]) -> float:
    """Milliseconds from the request to the answer."""
    begin = time.perf_counter()
    answer = visitor.predict(picture, rate, *sides, api_name="/tokens")
    taken = (time.perf_counter() - begin) * 1e3
    if answer.count("data-labels") != 6:
        raise ValueError(f"the page answered without groups: {answer[:300]}")
    return taken


@contextmanager
def _page() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of a page that runs as long as this."""
    command = [sys.executable, "-m", "agglo", "play", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if " at http" not in line:
            raise ValueError("agglo play did not start; what it said is above")
        yield line.partition(" at ")[2].split()[0], process
    finally:
        process.terminate()
        process.wait()
