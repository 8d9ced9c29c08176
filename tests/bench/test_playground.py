"""The benchmark of the playground: its table, and the processor time of a process."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from agglo.bench.playground import WANTED, _processor_seconds, _rates, table


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
    work = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ninput()"
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        time.sleep(0.1)
        taken = _processor_seconds(process)
        process.kill()
    assert taken is not None and 0.35 <= taken <= 0.6
