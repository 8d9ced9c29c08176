"""Every benchmark is listed once and can say what it takes; the small ones run."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import agglo
from agglo.lab.bench.methods import table as methods_table
from agglo.lab.bench.playground import WANTED, _processor_seconds, _rates
from agglo.lab.bench.playground import table as playground_table
from agglo.lab.cli import main
from agglo.lab.paper.registry import BENCHMARKS

FOLDER = Path(agglo.__file__).parent / "lab" / "bench"


def test_every_module_that_runs_is_listed() -> None:
    runs = {path.stem for path in FOLDER.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert runs == {benchmark.module for benchmark in BENCHMARKS}
    assert len({benchmark.name for benchmark in BENCHMARKS}) == len(BENCHMARKS)


@pytest.mark.parametrize("name", [benchmark.name for benchmark in BENCHMARKS])
def test_every_benchmark_has_a_help_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--help"])
    assert ended.value.code == 0 and f"agglo bench {name}" in capsys.readouterr().out


def test_methods_are_timed_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "methods.json"
    small = ["--batch-size", "2", "--tokens", "16", "--repeats", "1", "--json", str(path)]
    assert main(["bench", "methods", *small]) == 0
    record = json.loads(path.read_text())
    assert record["machine"]["cpu"] and record["machine"]["date"]
    assert record["settings"] == {"batch_size": 2, "tokens": 16, "dim": 192, "target": 8, "repeats": 1}
    assert all(len(result["milliseconds"]) == 1 for result in record["results"])
    assert methods_table(record).markdown() in capsys.readouterr().out


def test_ratios_of_methods_are_of_the_same_turn() -> None:
    """The second turn is slow for both. 3 is the median of 2, 3 and 9; the ratio of the medians would be 4.5."""
    taken = {"atc": [4.0, 30.0, 9.0], "tome": [2.0, 10.0, 1.0]}
    results = [{"name": name, "milliseconds": milliseconds} for name, milliseconds in taken.items()]
    assert methods_table({"reference": "tome", "results": results}).rows == [["tome", 2.0, 1.0], ["atc", 9.0, 3.0]]


def test_moves_of_the_playgrounds_slider() -> None:
    taken = [100.0] * 18 + [WANTED, WANTED + 1]
    [row] = playground_table([{"name": "atc", "milliseconds": taken, "processor_ms_per_move": 80.0}]).rows
    assert row[0] == "atc" and row[1] == 100.0 and row[3:] == [WANTED + 1, 0.95, 80.0]
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
