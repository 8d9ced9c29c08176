"""The CPU backend where it is really run: in thread pools, forked workers and read-only installations."""

import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import agglo
from agglo.clustering.cpu import threads
from agglo.clustering.cpu.threads import Pace
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


WITHOUT_PRIVATE_PARTS = """
import warnings
import numba.core.caching as caching
import numba.core.cpu as cpu
import numba.core.dispatcher as dispatcher

for owner in cpu.CPUTargetOptions.__mro__:
    if "_nrt" in vars(owner):
        del owner._nrt
{removal}

import torch, agglo
from agglo.clustering.distances import pairwise
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(pairwise(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), "cosine").tolist())
print([str(warning.message) for warning in caught if "agglo" in str(warning.message)])
"""
REMOVALS = {
    "no cache": "dispatcher.Dispatcher.enable_caching = lambda self: None",
    "no source stamp": """
original = caching.IndexDataCacheFile.__init__
def renamed(self, *arguments, **named):
    original(self, *arguments, **named)
    self.__dict__["_stamp"] = self.__dict__.pop("_source_stamp")
caching.IndexDataCacheFile.__init__ = renamed
""",
}


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS.keys())
def test_a_numba_without_the_private_parts_runs_without_a_cache(removal, tmp_path):
    code = WITHOUT_PRIVATE_PARTS.format(removal=removal)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    distances, warned = done.stdout.splitlines()
    assert torch.allclose(torch.tensor(eval(distances)), torch.tensor([[[0.0, 0.2], [0.2, 0.0]]]), atol=1e-6)
    assert warned.count("every process compiles agglo's kernels anew") == 1, warned
    assert not list(tmp_path.rglob("*.nbc")), "kernels were cached without a stamp of all sources"


# --- threads ----------------------------------------------------------------------------------------------------------

MOST = 8


def after(calls: list[tuple[float, float]], pace: Pace | None = None) -> Pace:
    """A pace that has seen calls (elapsed, at what time), each with one second of processor time."""
    pace = pace or Pace()
    for elapsed, now in calls:
        pace.note(pace.threads(MOST, now), MOST, elapsed, 1.0, now)
    return pace


def test_threads_that_do_not_pay_are_halved_down_to_one():
    pace = after([(0.2, 0.0), (2.0, 0.1), (0.2, 0.2)])
    assert pace.threads(MOST, 0.2) == MOST, "one loss may be chance"
    pace = after([(1.0, 0.0), (1.0, 0.0)])
    assert pace.threads(MOST, 0.001) == 4
    for _ in range(2):
        after([(1.0, 0.001), (1.0, 0.001)], pace)
    assert pace.threads(MOST, 0.002) == 1
    assert Pace().threads(1, 0.0) == 1


def test_threads_come_back_when_they_pay_again_and_attempts_get_rarer():
    pace = after([(1.0, 0.0), (1.0, 0.0)])
    assert pace.threads(MOST, 10.0) == MOST
    after([(0.2, 10.0)], pace)
    assert pace.halvings == 0
    pace = after([(1.0, 0.0), (1.0, 0.0)])
    pauses, now = [], 0.0
    for _ in range(9):
        begin = now
        while pace.threads(MOST, now) == 4:
            now += 0.001
        pauses.append(now - begin)
        after([(1.0, now)], pace)
    assert pauses[0] == pytest.approx(0.02, abs=0.002)
    assert all(later > earlier - 0.002 for earlier, later in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(1.0, abs=0.002)


def test_torch_threads_that_fall_during_a_call_take_nothing_back():
    pace = Pace()
    pace.note(4, 1, 0.2, 1.0, 0.0)  # began on four threads; torch.set_num_threads(1) meanwhile
    assert pace.halvings == 0
    assert pace.threads(MOST, 0.0) == MOST


def test_calls_too_short_to_judge_change_nothing():
    pace = Pace()
    for _ in range(9):
        pace.note(MOST, MOST, 1.0, 1e-5, 0.0)
    assert pace.threads(MOST, 0.0) == MOST


ON_A_POOL = """
import threading, torch, agglo
from agglo.clustering.cpu import threads
torch.set_num_threads(3)
seen = set()
def work(part, parts):
    seen.add((part, parts))
threads.run(work, 3)
x = torch.randn(40, 60, 8, generator=torch.Generator().manual_seed(0))
assert torch.equal(agglo.cluster(x, 9, backend="cpu"), agglo.cluster(x, 9, backend="torch"))
print(threads._openmp, sorted(seen), any(t.name.startswith("agglo") for t in threading.enumerate()))
"""


def test_variable_declines_openmp():
    def run_with(value: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "AGGLO_OPENMP": value, "PYTHONPATH": str(SOURCE.parent)}
        command = [sys.executable, "-c", ON_A_POOL]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    done = run_with("0")
    assert done.stdout.strip() == "None [(0, 3), (1, 3), (2, 3)] True", done.stderr
    assert "AGGLO_OPENMP='no' is not known; accepted: '0'" in run_with("no").stderr


def test_an_error_in_a_part_reaches_the_caller():
    def fail(part, parts):
        if part == 1:
            raise ArithmeticError("in part 1")

    with pytest.raises(ArithmeticError, match="in part 1"):
        threads.run(fail, 2)


def test_repeated_calls_are_identical():
    features = tokens(4, 150)
    first = agglo.cluster(features, 40)
    assert all(torch.equal(agglo.cluster(features, 40), first) for _ in range(20))
