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
    assert set(case["seconds"]) == {"agglo", "scikit-learn", "scipy", "fastcluster"}
    assert all(len(times) == 2 and min(times) > 0 for times in case["seconds"].values())
    assert case["same_partition"] == dict.fromkeys(case["seconds"], 1.0)


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
