"""The clustering benchmark measures what it says, on real contestants."""

import json
import os
import subprocess
import sys
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
    case = benchmark.measure(benchmark.spatial_tokens(2, 49), "average", repeats=2)
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
    with pytest.raises(ValueError, match="size '64' must be BxN"):
        benchmark.run(benchmark.Options(sizes=["64"]))


_PEAK = """
import torch
from agglo.clustering import cluster

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

tokens = torch.randn(1, 2500, 64, generator=torch.Generator().manual_seed(0))
cluster(tokens, k=1250, check=False)  # compiling takes memory as well
peaks = []
for _ in range(3):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = status("VmRSS")
    cluster(tokens, k=1250, check=False)
    peaks.append(status("VmHWM") - before)
# The least: what else the process does at a time, such as freeing memory of the compiler, is not the clustering's.
print(min(peaks) * 1024 / (4 * 2500**2))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process its peak memory")
def test_clustering_tokens_takes_two_matrices_at_most() -> None:
    """The distances and one matrix to work in. At 25 MB each, what the allocator rounds up is small against them."""
    # Without the threshold for mmap, glibc keeps what the warm-up returned.
    how = {"capture_output": True, "text": True, "check": True}
    run = subprocess.run([sys.executable, "-c", _PEAK], env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, **how)
    assert 0.8 < float(run.stdout) < 2.7
