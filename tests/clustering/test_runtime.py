"""The CPU backend where it is really run: in thread pools, forked workers and read-only installations."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import agglo
from tests.support.clusters import LINKAGES, distinct_distances, tokens

SOURCE = Path(agglo.__file__).parent


def test_many_python_threads_at_once():
    inputs = [distinct_distances(6, n, seed=n) for n in (20, 60, 130, 1100)]
    expected = [agglo.cluster(distances=x, k=9) for x in inputs]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: (i, agglo.cluster(distances=inputs[i % 4], k=9)), range(64)))
    assert all(torch.equal(labels, expected[i % 4]) for i, labels in results)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("linkage", LINKAGES)
def test_number_of_threads_does_not_change_the_result(threads, linkage):
    large, batch = distinct_distances(1, 1300), distinct_distances(13, 50)
    expected = [agglo.cluster(distances=x, k=20, linkage=linkage, backend="torch") for x in (large, batch)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for x, labels in zip((large, batch), expected, strict=True):
            assert torch.equal(agglo.cluster(distances=x, k=20, linkage=linkage, backend="cpu"), labels)
    finally:
        torch.set_num_threads(before)


FORKED = """
import os, torch, agglo

torch.set_num_threads(2)
x = torch.randn(16, 50, 8)
large = torch.cdist(torch.randn(1, 1100, 8), torch.zeros(1, 1100, 8))
large = large + large.transpose(1, 2)
expected, expected_large = agglo.cluster(x, 9), agglo.cluster(distances=large, k=9)

class Clusters(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        labels = agglo.cluster(x, 9)[i]
        # A worker has one torch thread. With more, torch's own parallel loops hang after a fork, agglo's must not.
        torch.set_num_threads(2)
        labels_large = agglo.cluster(distances=large, k=9)[0]
        torch.set_num_threads(1)
        return labels, labels_large

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Clusters(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for b, (labels, labels_large) in enumerate(loader):
        assert torch.equal(labels, expected[4 * b : 4 * b + 4])
        assert torch.equal(labels_large, expected_large.expand(4, -1))
    print("same in forked workers")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_forked_dataloader_workers_after_the_parent_has_clustered(tmp_path):
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same in forked workers", done.stderr


def run_copy(package: Path, home: Path) -> subprocess.CompletedProcess:
    """Cluster with a copy of agglo that cannot write beside itself, in a fresh process."""
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("a file where the cache folder would be: not writable, for root neither")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    environment |= {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home)}
    code = "import torch, agglo; print(agglo.__file__); print(agglo.cluster(torch.eye(4), 2).tolist())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)


def copy_of_the_package(folder: Path) -> Path:
    return Path(shutil.copytree(SOURCE, folder / "agglo", ignore=shutil.ignore_patterns("__pycache__")))


def test_read_only_package_caches_for_the_user(tmp_path):
    package = copy_of_the_package(tmp_path)
    done = run_copy(package, tmp_path / "home")
    assert done.stdout.split() == [str(package / "__init__.py"), "[0,", "0,", "0,", "1]"], done.stderr
    assert list((tmp_path / "home").rglob("*.nbi")), "nothing was cached in the user's folder"


def test_nowhere_to_cache_still_runs(tmp_path):
    package = copy_of_the_package(tmp_path)
    (tmp_path / "home").write_text("a file: no folder can be made in it")
    done = run_copy(package, tmp_path / "home")
    assert done.stdout.split()[0] == str(package / "__init__.py"), done.stderr
    assert done.stdout.split()[1:] == ["[0,", "0,", "0,", "1]"], done.stderr


def test_repeated_calls_are_identical():
    features = tokens(4, 150)
    first = agglo.cluster(features, 40)
    assert all(torch.equal(agglo.cluster(features, 40), first) for _ in range(20))
