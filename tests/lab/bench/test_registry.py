"""Every benchmark is listed once, can say what it takes, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agglo
from agglo.lab.bench.methods import table as methods_table
from agglo.lab.cli import main
from agglo.lab.paper.registry import BENCHMARKS

FOLDER = Path(agglo.__file__).parent / "lab" / "bench"


def test_every_module_that_runs_is_listed() -> None:
    runs = {path.stem for path in FOLDER.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert runs == {benchmark.module for benchmark in BENCHMARKS}
    assert len({benchmark.name for benchmark in BENCHMARKS}) == len(BENCHMARKS)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_every_benchmark_has_a_help_page(
    benchmark: object, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--help"])
    assert ended.value.code == 0 and f"agglo bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["methods", "--batch-size", "2", "--tokens", "16", "--repeats", "1", "--json", "methods.json"],
    ],
    ids=lambda words: words[0],
)
def test_small_runs_print_a_table(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n|") >= 2
    for path in tmp_path.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["machine"]["cpu"] and record["machine"]["date"]
        assert record["settings"] == {"batch_size": 2, "tokens": 16, "dim": 192, "target": 8, "repeats": 1}
        assert all(len(result["milliseconds"]) == 1 for result in record["results"])
        assert methods_table(record).markdown() in printed
    assert ("--json" in words) == (tmp_path / "methods.json").exists()
