"""The benchmark of the playground: its table, and the processor time of a process."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from agglo.lab.bench.playground import WANTED, _processor_seconds, _rates, table


def test_the_table_says_how_many_moves_were_quick_enough() -> None:
    taken = [100.0] * 18 + [WANTED, WANTED + 1]
    [row] = table([{"name": "atc", "milliseconds": taken, "processor_ms_per_move": 80.0}]).rows
    assert row[0] == "atc" and row[1] == 100.0 and row[3:] == [WANTED + 1, 0.95, 80.0]


def test_no_two_moves_in_a_row_are_to_the_same_place() -> None:
    rates = _rates(40)
    assert len(set(rates)) == 10 and all(one != other for one, other in pairwise(rates))
    assert min(rates) == 0.5 and max(rates) == pytest.approx(0.95)  # ToMe cannot go below


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells the time of a process")
def test_processor_time_is_what_a_process_took() -> None:
    clock = "time.process_time()"
    work = f"import time\nwhile {clock} < 0.4: pass\nprint({clock}, flush=True)\ninput()\nprint({clock}, flush=True)"
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        before = float(process.stdout.readline())
        taken = _processor_seconds(process)
        process.stdin.write("\n")
        process.stdin.flush()
        after = float(process.stdout.readline())
    # Linux counts both parts of it, of the process and of the kernel for it, in hundredths.
    assert taken is not None and before - 0.03 <= taken <= after + 0.03
