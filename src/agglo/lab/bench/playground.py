"""How long a visitor of `agglo play` waits after a move of the slider.

Starts the page in a process of its own and asks it as a browser does, through its queue: the time from the request to
the whole answer, with the groups of two methods as images, the numbers and the tree. Every move is to another keep
rate, so that nothing can be remembered. What the browser then takes to draw it is not in it. Beside it stands the
processor time of the page's process, which says how long it takes on a machine that has nothing else to do.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

from agglo.lab.bench import conclude
from agglo.lab.options import option
from agglo.utils.files import require_output
from agglo.utils.machine import machine
from agglo.utils.progress import progress
from agglo.utils.tables import Column, Table
from agglo.utils.timing import stopwatch

WANTED = 300.0  # milliseconds that nobody is to wait for longer
_IMAGES = ("example:boot", "example:pullover", "example:bag")
_SIDES = {
    "atc beside tome": ("atc", "average", "tome", "average"),
    "atc beside atc": ("atc", "single", "atc", "complete"),
}
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time."""

    repeats: Annotated[int, (2, math.inf)] = option(40, "moves of the slider")
    json: Path | None = option(None, "every timing, and the machine")


def run(options: Options) -> None:
    """Start the page, move its slider, print a table and write the record."""
    from gradio_client import Client

    if options.json is not None:
        require_output(options.json)
    where, results = machine(), []
    total = len(_SIDES) * options.repeats
    with _page() as (address, process), progress(total, "bench playground") as advance:
        visitor = Client(address, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 120})
        for name, sides in _SIDES.items():
            for rate in _rates(_WARM_UP):
                _move(visitor, _IMAGES[0], rate, sides)
            begin, taken = _processor_seconds(process), []
            for number, rate in enumerate(_rates(options.repeats)):
                taken.append(_move(visitor, _IMAGES[number % len(_IMAGES)], rate, sides))
                advance(f"{name}: {taken[-1]:.0f} ms")
            end = _processor_seconds(process)
            own = None if begin is None or end is None else (end - begin) * 1e3 / len(taken)
            results.append({"name": name, "milliseconds": taken, "processor_ms_per_move": own})
    conclude({"machine": where, "wanted_ms": WANTED, "results": results}, table(results), options.json)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the milliseconds per move as a table."""
    titles = ("median, ms", "95 of 100 below", "longest", f"within {WANTED:.0f} ms", "processor time of the page, ms")
    columns = [Column("what is shown", left=True)]
    columns += [Column(title, ".0%" if title.startswith("within") else ".0f") for title in titles]
    rows = []
    for result in results:
        taken = result["milliseconds"]
        within = sum(each <= WANTED for each in taken) / len(taken)
        slow = quantiles(taken, n=20, method="inclusive")[-1]
        rows.append([result["name"], median(taken), slow, max(taken), within, result["processor_ms_per_move"]])
    return Table(columns, rows)


def _processor_seconds(process: subprocess.Popen[str]) -> float | None:
    """Return the processor time of a process so far; None where the system is not Linux."""
    path = Path(f"/proc/{process.pid}/stat")
    if not path.exists():
        return None
    # The name, in brackets, may hold blanks: fields are counted behind it.
    fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rates(count: int) -> Sequence[float]:
    """Return keep rates from 0.5 to 0.95, back and forth, no two alike in a row."""
    return [0.5 + 0.05 * (number * 3 % 10) for number in range(count)]


def _move(visitor: Any, image: str, rate: float, sides: Sequence[str]) -> float:
    """Return the milliseconds from the request to the answer."""
    with stopwatch() as taken:
        answer = visitor.predict(image, rate, *sides, api_name="/tokens")
    if answer.count("data-labels") != 6:
        raise ValueError(f"the page answered without groups: {answer[:300]}")
    return taken.seconds * 1e3


@contextmanager
def _page() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address and the process of a page that runs as long as the block."""
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
