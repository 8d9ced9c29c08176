"""Every benchmark is listed once, can say what it takes, and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import agglo
from agglo.cli import main
from agglo.reproduce.registry import BENCHMARKS

FOLDER = Path(agglo.__file__).parent / "bench"


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
        ["methods", "--batch-size", "2", "--tokens", "16", "--repeats", "1"],
        ["centroids", "--sizes", "16", "--repeats", "1"],
        ["gpu-roofline", "--side", "4", "--images", "2", "--batch", "4"],
    ],
    ids=lambda words: words[0],
)
def test_small_runs_print_a_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 0
    assert capsys.readouterr().out.count("\n|") >= 2
