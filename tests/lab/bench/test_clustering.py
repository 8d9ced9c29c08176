"""The clustering benchmark measures what it says, on real contestants."""

import json
from pathlib import Path

import pytest
import torch

from agglo.clustering.distances import pairwise
from agglo.lab.bench import clustering as benchmark
from agglo.lab.cli import main


def test_tokens_resemble_their_neighbours():
    tokens = benchmark.spatial_tokens(2, 196)
    assert tokens.shape == (2, 196, 64)
    grid = pairwise(tokens, "cosine").view(2, 14, 14, 14, 14)
    near = torch.stack([grid[:, i, j, i, j + 1] for i in range(14) for j in range(13)]).mean()
    assert near < 0.5 * pairwise(tokens, "cosine").mean()
    with pytest.raises(ValueError, match="n=50 must be a square number"):
        benchmark.spatial_tokens(1, 50)


def test_contestants_agree_and_all_are_timed():
    case = benchmark.measure(pairwise(benchmark.spatial_tokens(2, 49), "cosine"), "average", repeats=2)
    assert set(case.seconds) == {"agglo", "scikit-learn", "scipy", "fastcluster"}
    assert all(len(times) == 2 and min(times) > 0 for times in case.seconds.values())
    assert case.same_partition == dict.fromkeys(case.seconds, 1.0)
    case.seconds = {"agglo": [1.0, 3.0, 2.0], "scipy": [9.0, 11.0, 10.0]}
    assert case.ratio("scipy") == 5.0


def test_contention_is_timed_once_the_processes_are_busy(tmp_path, monkeypatch):
    begun, seen = tmp_path / "begun", []
    monkeypatch.setattr(benchmark, "_BUSY", f"open({str(begun)!r}, 'w').close()\n{benchmark._BUSY}")
    monkeypatch.setattr(benchmark, "by_agglo", lambda *arguments: seen.append(begun.exists()))
    result = benchmark.measure_contention(2, 49, 2, 1, repeats=1)
    assert seen and all(seen) and result.alone[0] > 0 and result.together[0] > 0
    slow = benchmark.Contention(1, 2, 49, 2, alone=[1.0, 2.0, 3.0], together=[2.5, 2.6, 9.0])
    assert slow.ratio() == 1.3
    assert "1.30 |" in benchmark.contention_table([slow])


def test_run_prints_a_table_and_keeps_the_numbers(tmp_path, capsys):
    output = tmp_path / "clustering.json"
    arguments = ["--sizes", "2x49", "--linkage", "single", "--repeats", "1", "--json", str(output)]
    assert main(["bench", "clustering", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "| spatial | 2 x 49 | single |" in printed
    report = json.loads(output.read_text())
    assert [case["n"] for case in report["cases"]] == [49]
    assert report["machine"]["threads"] == 2
    assert report["peak_memory"].keys() == {"single"}
    with pytest.raises(ValueError, match="size '64' must be BxN"):
        benchmark.run(benchmark.Options(sizes=["64"]))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process its peak memory")
def test_clustering_tokens_takes_two_matrices_at_most() -> None:
    """The distances and one matrix to work in. At 25 MB each, what the allocator rounds up is small against them."""
    matrices = benchmark.peak_memory(2500, "average", of_tokens=True)
    assert matrices is not None and 0.8 < matrices < 2.7
